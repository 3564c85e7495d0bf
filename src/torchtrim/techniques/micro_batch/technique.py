"""Micro-batch: a module runs in parts of the batch, so that activations are there for one at a time.

Forward runs the parts one after the other without gradients and puts their results together. When backward
comes, each part runs once more, now with gradients, and its backward follows at once with its rows of the
result's gradient; parameters add up the gradients of the parts. What is outside the module, such as the
loss, sees the whole batch, so it needs no normalization. It costs the module's forward once more, and runs
more and smaller kernels.

A loss that the module takes itself is divided by what the whole batch's mean divides by: the number of labels
that are not `ignore_index`, or the sum of their class weights, and not the number of samples. So are means
over everything. A number that is neither a sum nor such a mean is refused. Dropout draws the numbers of all
samples for each part and takes the part's rows, so each sample gets the mask that it would have got.

At the first batch the module is tried: on some samples, on the same with others in place of half of them,
and on the halves. It is refused, with the module's name, where samples are mixed (BatchNorm in training,
statistics of the batch, losses that compare samples), where buffers change in forward, where tensors are left
on modules, where results cannot be put together, and where hooks would see each part. Evaluation without
gradients runs as it is. `torch.autograd.grad`, `backward(inputs=...)` and `create_graph` are refused.

The samples are along the first dimension of the first tensor that it is given; where those mix, as the times
of a sequence do, along the second.

`where` names modules (`Net.blocks.3`) and ranges of a Sequential (`Net.layers[2:6]`), such as what is between
two BatchNorms. Option `parts`: in how many parts, 2 or more.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from torchtrim.errors import ApplyFailed
from torchtrim.executor.registry import Handle, Option, all_or_none
from torchtrim.records.finding import Equivalence
from torchtrim.records.plan import Technique
from torchtrim.step.edits import Edit, joined
from torchtrim.step.step import Step
from torchtrim.techniques.micro_batch.edit import edit_of
from torchtrim.techniques.micro_batch.found import PARTS, splits_of

if TYPE_CHECKING:
    from torch import nn


class MicroBatch:
    """`where` names modules and ranges of a Sequential that run in `parts` parts of the batch."""

    name = "micro_batch"
    takes = ("parts",)
    equivalence: Equivalence = "ROUNDING"

    def options(self, step: Step) -> Sequence[Option]:
        """Every module that keeps much for backward and has a batch, in 2, 4, 8 parts and so on."""
        return [
            Option(self.name, split.where, split.spans, None, (("parts", parts),))
            for split in splits_of(step)
            for parts in PARTS
            if parts <= split.size
        ]

    def edits(self, step: Step, option: Option) -> Edit | None:
        """The parts, in place of all samples at once; None where backward does not come by."""
        parts = int(dict(option.settings)["parts"])
        found = [edit_of(step, span, parts) for span in option.spans]
        edits = [edit for edit in found if edit is not None]
        return joined(edits) if edits else None

    def apply(self, roots: Mapping[str, nn.Module], technique: Technique) -> Handle:
        """Make the named modules run in parts. Raises `ApplyFailed`, the model as it was."""
        from torchtrim.techniques.micro_batch.places import in_parts

        parts = technique.options.get("parts")
        if type(parts) is not int or parts < 2 or len(technique.options) > 1:
            raise ApplyFailed(
                f"micro_batch has one option, `parts`, which is 2 or more, and the plan has "
                f"{technique.options!r}. Write `parts = 2`, or plan again."
            )
        _refuse_several_processes()
        return all_or_none(technique.where, lambda where: in_parts(roots, where, parts))


TECHNIQUE = MicroBatch()


def _refuse_several_processes() -> None:
    import torch.distributed as distributed

    several = distributed.is_available() and distributed.is_initialized()
    if several and distributed.get_world_size() > 1:
        raise ApplyFailed(
            "micro_batch adds up gradients part by part, and several processes exchange them once. Take it "
            "out of the plan, and give each process a smaller batch."
        )
