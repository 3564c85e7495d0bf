"""Split time: an LSTM or GRU runs a few time steps at a time, and keeps its states alone.

As PyTorch runs them, a recurrent layer keeps the gates of every time step for backward, or a workspace of
the library that computes it, and backward makes the slopes of all gates: each four times as wide as the
states, beside copies of the weights in a layout of the library's own. That often sets the peak of a language
model or a speech model. Here a layer is computed with plain products. It keeps what goes in, its states and
nothing else; backward goes through time in pieces of a few steps, computes their gates again from the states
before them, and adds the gradients of the weights up piece by piece.

The gates are the same functions of the same sums, but a product of fewer rows may add up in another order,
and gradients of weights are sums over pieces. So it is planned where `--allow rounding` is given.

It is for `nn.LSTM` and `nn.GRU` that are given one tensor of a batch and draw no random numbers. Calls with
packed sequences, under autocast, without gradients, in a compiled model and of a replica of
`nn.DataParallel` run as they are. An LSTM with projections, and dropout between layers, are refused. Its
result is needed for its own backward, so what overwrites it, `out.relu_()`, raises, and it cannot be
differentiated twice (`create_graph=True` raises). `where` names modules.
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
from torchtrim.step.edits import Block, Edit, Need, joined
from torchtrim.step.step import Step
from torchtrim.techniques.split_time.found import Recurrent, layers_of

if TYPE_CHECKING:
    from torch import nn


_TURN_SECONDS = 1.1e-4
"""Of a time step of one layer in one direction, forward and backward, where it is small."""


class SplitTime:
    """`where` names LSTMs and GRUs."""

    name = "split_time"
    equivalence: Equivalence = "ROUNDING"

    def options(self, step: Step) -> Sequence[Option]:
        """The recurrent layers that were given one tensor and drew nothing at random."""
        return [
            Option(self.name, where, tuple(one.span for one in calls))
            for where, calls in layers_of(step).items()
        ]

    def edits(self, step: Step, option: Option) -> Edit | None:
        """What is within a call is there for a few steps at a time, and the states of a cell are kept."""
        calls = layers_of(step).get(option.where, ())
        edits = [edit for one in calls if (edit := _edit(step, one)) is not None]
        return joined(edits) if len(edits) == len(calls) and edits else None

    def apply(self, roots: Mapping[str, nn.Module], technique: Technique) -> Handle:
        """Give the modules a forward in pieces of time. Raises `ApplyFailed`, the model as it was."""
        from torchtrim.techniques.split_time.running import split

        if technique.options:
            raise ApplyFailed(f"split_time has no options, and the plan has {technique.options!r}.")
        return all_or_none(technique.where, lambda where: split(where, module_at(roots, where)))


TECHNIQUE = SplitTime()


def _more_seconds(step: Step, one: Recurrent) -> float:
    """What its time steps take over the seconds of its own tasks, which they take at least."""
    now = range(*one.span)
    tasks = {*now, *(n for task in now for n in step.backward.get(task, ()))}
    own: float = sum(step.tasks[n].seconds for n in tasks)
    return max(0.0, one.turns * _TURN_SECONDS - own)


def _edit(step: Step, one: Recurrent) -> Edit | None:
    edit = edit_of(step, one.span, 1, within=one.within, seconds=_more_seconds(step, one))
    if edit is None:
        return None
    ends = max(insert.at for insert in edit.inserts) + 1
    kept = (Need(one.result, ends),) if one.result >= 0 else ()
    blocks = (*edit.blocks, Block(one.kept_bytes, one.span.first, ends))
    return edit._replace(blocks=blocks, needs=(*edit.needs, *kept))
