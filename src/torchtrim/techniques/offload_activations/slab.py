"""One block of pinned memory for all that a plan offloads: where each place is in it."""

from __future__ import annotations

from collections import defaultdict

import msgspec

from torchtrim.records.plan import Technique
from torchtrim.step.host import host_blocks, packed
from torchtrim.step.step import Step
from torchtrim.techniques.offload_activations.places import Place, placed, with_offsets
from torchtrim.techniques.offload_activations.windows import edit_of

SLAB = "slab_bytes"


def laid_out(step: Step, technique: Technique) -> Technique:
    """The technique with the bytes of the slab, and at which of its offsets each place is, in each call."""
    places = [placed(where)[0] for where in technique.where]
    blocks, owners = [], []
    for place in places:
        edit = edit_of(step, place)
        for block in host_blocks(edit) if edit is not None else ():
            blocks.append(block)
            owners.append(place)
    packing = packed(blocks)
    offsets: defaultdict[Place, dict[int, None]] = defaultdict(dict)
    for number, place in enumerate(owners):
        offsets[place][packing.offsets[number]] = None
    where = tuple(with_offsets(place, tuple(offsets[place])) for place in places)
    options = {**technique.options, SLAB: packing.height}
    return msgspec.structs.replace(technique, where=where, options=options)
