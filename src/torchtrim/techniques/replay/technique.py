"""Replay: drop single tensors that autograd saved, and run the operators that made them again in backward.

What a norm, an activation, a cast or a copy makes is often large and quickly made. Where what it was made
from is there in backward anyway, the result need not be kept: it is made again, bit for bit, when backward
first asks for it. Recompute does so for whole modules; this does it for single operators and short chains of
them, wherever they were called from, a root's own `forward` included.

`where` names a module and operators of its calls: `Net.mlp:gelu.0` is the first gelu that runs in a call of
`Net.mlp`, in its children or itself. `Net.mlp:addmm.0,gelu.0` runs both again, and keeps neither's result.

While such a module runs, a dispatch mode notes how the named results were made, and hooks on saved tensors
put a recipe in their place. What was written in place afterwards is kept as it is. Random operators never
run again: the noise of a dropout is kept as one bit for each element, which is exact. A batch norm that runs
again takes the statistics that it found. Under hooks of others, such as a checkpoint's of the script's own,
everything is kept.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from torchtrim.executor.registry import Handle, Option
from torchtrim.records.finding import Equivalence
from torchtrim.records.plan import Technique
from torchtrim.step.edits import Edit, joined
from torchtrim.step.simulate import deaths
from torchtrim.step.step import DEVICE, Step
from torchtrim.techniques.replay.editing import edit_of
from torchtrim.techniques.replay.groups import groups_of

if TYPE_CHECKING:
    from torch import nn


class Replay:
    """`where` holds places such as `Net.mlp:gelu.0`."""

    name = "replay"
    equivalence: Equivalence = "BITWISE"

    def options(self, step: Step) -> Sequence[Option]:
        """Each tensor that is worth it, alone and with what it is made from."""
        return [Option(self.name, where, group.spans) for where, group in groups_of(step).items()]

    def edits(self, step: Step, option: Option) -> Edit | None:
        """The tensors dropped, and made again when backward asks for it."""
        group = groups_of(step).get(option.where)
        if group is None:
            return None
        edit = joined(edit_of(step, one) for one in group.calls)
        return edit if _saves(step, edit) else None

    def apply(self, roots: Mapping[str, nn.Module], technique: Technique) -> Handle:
        """Watch the named operators. Raises `ApplyFailed`, the model as it was."""
        from torchtrim.techniques.replay.watching import watch

        return watch(roots, technique.where)


TECHNIQUE = Replay()


def _saves(step: Step, edit: Edit) -> bool:
    """Whether bytes are alive for fewer tasks than before, in sum."""
    saved = sum(
        step.tensors[number].bytes * (step.tensors[number].death - end)
        for number, end in deaths(step, [edit]).items()
        if step.tensors[number].pool == DEVICE
    )
    return saved > sum(block.bytes * (block.last - block.first) for block in edit.blocks)
