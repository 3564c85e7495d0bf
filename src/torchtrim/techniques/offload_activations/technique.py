"""Offload of activations: what autograd saved is on the host until backward needs it again.

A large activation is copied to pinned memory of the host as soon as autograd has saved it, while the device
computes on; its memory on the device is let go later in forward, when the copy has had its time. Backward
brings it back ahead of its use. Values are copied, so every bit stays.

`where` says all of that: `Net:gelu.3 until addmm.9 from addmm.12` is what the fourth gelu of a call of
`Net` makes; it is let go when the tenth addmm begins (`until end`: when the call ends), and fetched when
backward comes to what the thirteenth addmm saved. Operators are counted over the whole call of the root,
its modules included; `native_dropout.0/1` is the second result of an operator.

A storage is moved once, however many views of it autograd saved, and parameters never, since no operator of
the step made them. Copies run on two streams of their own. The device's copy is let go at the planned
operator, which awaits the copy, so that the peak is that of the plan and no matter of luck. What was
written in place before it was saved is copied as it was saved. Saved tensors may be asked for twice. Under
hooks of others, such as a checkpoint's of the script's own, and where autograd saved something else than
was planned, everything stays on the device.

Pinned memory is one slab, taken in the first step. `slab_bytes` is its size and ` at 65536` ends a place
that begins there: offsets are packed from how long each tensor is away, so that tensors that are away at
different times share bytes. A copy awaits what was read there before.

Where `--host-memory` leaves no room, a tensor may go to a memory-mapped file, with a slab of its own:
` in file` says so. Compute pauses for such a copy. Without `--host-memory` nothing goes to a file, and
on a CPU nothing goes anywhere else.

When a tensor is let go and fetched is chosen by the link of the named device, as if every candidate was
offloaded; how long a plan's copies await each other on that link, one lane in each direction, is in its
predicted time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from torchtrim.executor.registry import Handle, Option
from torchtrim.records.finding import Equivalence
from torchtrim.records.plan import Technique
from torchtrim.step.edits import Edit
from torchtrim.step.step import Step
from torchtrim.techniques.offload_activations.places import Room, placed, written
from torchtrim.techniques.offload_activations.slab import FILE, SLAB, laid_out
from torchtrim.techniques.offload_activations.windows import edit_of, windows_of

if TYPE_CHECKING:
    from torch import nn


class OffloadActivations:
    """`where` holds places such as `Net:gelu.3 until addmm.9 from addmm.12`."""

    name = "offload_activations"
    takes = (SLAB, FILE)
    equivalence: Equivalence = "BITWISE"

    def options(self, step: Step) -> Sequence[Option]:
        """Each large tensor whose copies have the time that they take, in the order of backward."""
        if step.profile is None or step.profile.device.startswith("cpu"):
            return []
        windows = windows_of(step)
        return [Option(self.name, str(place), spans) for place, spans in windows.items()]

    def to_files(self, step: Step) -> Sequence[Option]:
        """The same in a memory-mapped file, also where the device is a CPU."""
        return [
            Option(self.name, written(place, Room(in_file=True)), spans)
            for place, spans in windows_of(step).items()
        ]

    def edits(self, step: Step, option: Option) -> Edit | None:
        """The tensor is gone in between, and a copy is on the host."""
        place, room = placed(option.where)
        return edit_of(step, place, in_file=room.in_file)

    def apply(self, roots: Mapping[str, nn.Module], technique: Technique) -> Handle:
        """Watch the roots. Raises `ApplyFailed`, the model as it was."""
        from torchtrim.techniques.offload_activations.moving import Mover
        from torchtrim.techniques.offload_activations.watching import watch

        pinned, file = (technique.options.get(name, 0) for name in (SLAB, FILE))
        mover = Mover(*(size if isinstance(size, int) else 0 for size in (pinned, file)))
        return watch(roots, technique.where, mover)

    def settled(self, step: Step, technique: Technique) -> Technique:
        """With where each place is in the slab."""
        return laid_out(step, technique)


TECHNIQUE = OffloadActivations()
