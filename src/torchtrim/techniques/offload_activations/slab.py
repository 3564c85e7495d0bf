"""One block of pinned memory, or of a file, for all that a plan offloads: where each place is in it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

import msgspec

from torchtrim.records.plan import Technique
from torchtrim.step.host import host_blocks, packed
from torchtrim.step.step import Step
from torchtrim.techniques.offload_activations.places import Place, Room, placed, written
from torchtrim.techniques.offload_activations.windows import edit_of

SLAB, FILE = "slab_bytes", "file_bytes"


def laid_out(step: Step, technique: Technique) -> Technique:
    """The technique with the bytes of its slabs, and at which offsets each place is, one for each call."""
    found = [placed(where) for where in technique.where]
    rooms: dict[Place, Room] = {}
    options = dict(technique.options)
    for in_file, name in ((False, SLAB), (True, FILE)):
        places = [place for place, room in found if room.in_file == in_file]
        height, offsets = _packed(step, places, in_file=in_file)
        rooms |= {place: Room(tuple(offsets[place]), in_file) for place in places}
        if height:
            options[name] = height
    where = tuple(written(place, rooms[place]) for place, _ in found)
    return msgspec.structs.replace(technique, where=where, options=options)


def _packed(
    step: Step, places: list[Place], *, in_file: bool
) -> tuple[int, Mapping[Place, dict[int, None]]]:
    """The height of a slab, and the offsets of each place in it."""
    blocks, owners = [], []
    for place in places:
        edit = edit_of(step, place, in_file=in_file)
        for block in host_blocks(edit) if edit is not None else ():
            blocks.append(block)
            owners.append(place)
    packing = packed(blocks)
    offsets: defaultdict[Place, dict[int, None]] = defaultdict(dict)
    for number, place in enumerate(owners):
        offsets[place][packing.offsets[number]] = None
    return packing.height, offsets
