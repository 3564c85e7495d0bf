"""Activation offload: saved tensors are on the host until backward needs them.

A large activation is copied to pinned host memory as soon as autograd saves it, while the device computes.
Its device memory is freed later in forward, when the copy is done, and fetched back ahead of its use in
backward. Values are only copied, so results are bitwise equal.

`where` states all of this: `Net:gelu.3 until addmm.9 from addmm.12` is the result of the fourth gelu in a
call of `Net`; it is freed when the tenth addmm starts (`until end`: at the end of the call), and fetched when
backward reads what the thirteenth addmm saved. Ordinals count over the whole call of the root, child modules
included; `dropout.0/1` is the second result of an operator.

A storage moves once, however many views of it are saved. Parameters never move, since no operator of the step
creates them. Copies run on two separate streams. The device memory is freed at the planned operator,
which waits for the copy, so the peak is as planned and does not depend on timing. A tensor that is written in
place later is copied with the values that were saved. Saved tensors may be read twice. Under other
saved-tensor hooks, such as a checkpoint in the script, and where autograd saves something other than planned,
everything stays on the device.

Pinned memory is one slab, allocated in the first step. `slab_bytes` is its size, and ` at 65536` at the end
of a place its offset: tensors that are away at different times share bytes. A copy waits for earlier reads of
its bytes.

If `--host-memory` leaves no room, a tensor may go to a memory-mapped file with its own slab, marked ` in
file`. Compute pauses for such a copy. Files are used only with `--host-memory`, and are the only target on a
CPU.

The times to free and to fetch are chosen for the link of the named device, as if every candidate were
offloaded. Where that is too late for a budget, a large tensor may be freed after its last use and fetched
when it is read, and compute awaits both copies. The predicted time includes these delays and those of copies
that queue on that link, one lane in each direction.
"""

from __future__ import annotations

from collections.abc import Sequence

from torchtrim.executor.registry import Handle, Option, Roots, TechniqueUnit
from torchtrim.records.plan import Technique
from torchtrim.step.edits import Edit
from torchtrim.step.step import Step
from torchtrim.techniques.offload_activations.places import Room, placed, written
from torchtrim.techniques.offload_activations.windows import (
    FILE_BYTES,
    SLAB_BYTES,
    edit_of,
    laid_out,
    windows_of,
)


class OffloadActivations(TechniqueUnit):
    """`where` holds places such as `Net:gelu.3 until addmm.9 from addmm.12`."""

    name = "offload_activations"
    does = "keep saved tensors on the host until backward"
    takes = (SLAB_BYTES, FILE_BYTES)
    equivalence = "BITWISE"
    goes_around = True
    assumes = ("no hooks on saved tensors",)
    unseen = ("nothing writes through `.data` between forward and backward",)

    def options(self, step: Step) -> Sequence[Option]:
        """Return each large tensor with enough time for its copies, in the order of backward."""
        if step.profile is None or step.profile.device.startswith("cpu"):
            return []
        windows = windows_of(step)
        return [Option(self.name, str(place), spans) for place, spans in windows.items()]

    def to_files(self, step: Step) -> Sequence[Option]:
        """Return the same options with a memory-mapped file, on a CPU too."""
        return [
            Option(self.name, written(place, Room(in_file=True)), spans)
            for place, spans in windows_of(step).items()
        ]

    def edits(self, step: Step, option: Option) -> Edit | None:
        """Free the tensor in between, and hold a copy on the host."""
        place, room = placed(option.where)
        return edit_of(step, place, in_file=room.in_file)

    def apply(self, roots: Roots, technique: Technique) -> Handle:
        """Watch the roots. If it raises `ApplyFailed`, the model is unchanged."""
        from torchtrim.techniques.offload_activations.moving import StorageMover
        from torchtrim.techniques.offload_activations.watching import watch

        pinned, file = (technique.options.get(name, 0) for name in (SLAB_BYTES, FILE_BYTES))
        mover = StorageMover(*(size if isinstance(size, int) else 0 for size in (pinned, file)))
        return watch(roots, technique.where, mover)

    def settled(self, step: Step, technique: Technique) -> Technique:
        """Add the slab offset of each place."""
        return laid_out(step, technique)


TECHNIQUE = OffloadActivations()
