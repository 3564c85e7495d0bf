"""Split matmul: a module that treats each row by itself runs some rows at a time.

An MLP makes hidden states four times as wide as what goes in and comes out, keeps them and their activation
for backward, and there makes the gradients of both: where a block is run again in backward that sets the
peak, however many blocks there are. Here the module keeps its input alone. Forward goes through the rows in
`parts` and writes each part's result into the whole; backward runs a part again, takes its gradients, and
adds those of parameters up, so hidden states are there for one part at a time. It costs the forward a
second time, as `recompute` does, and a few calls for each part.

Each row of the result is that of the same row as before, but a product of fewer rows may add up in another
order, and gradients of parameters are sums of the parts'. So it is planned where `--allow rounding` is given.

It is for modules that were seen to take one tensor and give one, with nothing but products with their own
parameters, pointwise operators and norms of rows in between: no random numbers, no BatchNorm, no hooks, no
attention, whose rows see each other. Calls without gradients run as they are. `where` names modules.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from torchtrim.errors import ApplyFailed
from torchtrim.executor.places import module_at
from torchtrim.executor.registry import Handle, Option, all_or_none
from torchtrim.executor.row_edits import edit_of
from torchtrim.records.finding import Equivalence
from torchtrim.records.plan import Technique
from torchtrim.step.edits import Edit, joined
from torchtrim.step.step import Step
from torchtrim.techniques.split_matmul.found import modules_of

if TYPE_CHECKING:
    from torch import nn

_PARTS = 8


class SplitMatmul:
    """`where` names modules that treat each row by itself. `parts`: how many there are of the rows."""

    name = "split_matmul"
    takes = ("parts",)
    equivalence: Equivalence = "ROUNDING"

    def options(self, step: Step) -> Sequence[Option]:
        """The modules that do so and are wider within than outside."""
        return [
            Option(self.name, where, spans, None, (("parts", _PARTS),))
            for where, spans in modules_of(step).items()
        ]

    def edits(self, step: Step, option: Option) -> Edit | None:
        """What is within a call is there for a part at a time."""
        parts = int(dict(option.settings)["parts"])
        edits = [edit_of(step, span, parts) for span in option.spans]
        found = [edit for edit in edits if edit is not None]
        return joined(found) if len(found) == len(edits) and found else None

    def apply(self, roots: Mapping[str, nn.Module], technique: Technique) -> Handle:
        """Give the modules a forward that runs in parts. Raises `ApplyFailed`, the model as it was."""
        from torchtrim.techniques.split_matmul.running import split

        parts = technique.options.get("parts")
        if type(parts) is not int or parts < 2 or len(technique.options) != 1:
            raise ApplyFailed(
                f"split_matmul has the option `parts`, 2 or more, and the plan has {technique.options!r}."
            )
        return all_or_none(
            technique.where, lambda where: split(where, module_at(roots, where), parts)
        )


TECHNIQUE = SplitMatmul()
