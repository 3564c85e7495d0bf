"""Split time: an LSTM or GRU runs a few time steps at a time, and keeps only its states.

In PyTorch, a recurrent layer keeps the gates of every time step for backward, or a workspace of the library
that computes it, and backward computes the gradients of all gates: each is four times as wide as the states,
and there are copies of the weights in a layout of the library's own. That often sets the peak of a language
or speech model. Here a layer is computed with plain matrix products and keeps only its input and its states;
backward runs through time in pieces of a few steps, recomputes their gates from the states before them, and
accumulates the gradients of the weights.

The gates are the same functions of the same sums, but a product of fewer rows may add in another order, and
gradients of weights are sums over pieces. So it is planned only with `--allow rounding`.

It supports `nn.LSTM` and `nn.GRU` that take one batched tensor and draw no random numbers. Calls with packed
sequences, under autocast, without gradients, in a compiled model and of a replica of `nn.DataParallel` run
unchanged. An LSTM with projections, and dropout between layers, are refused. Overwriting the output, as in
`out.relu_()`, raises, since its own backward needs it, and so does `create_graph=True`. `where` names
modules.
"""

from __future__ import annotations

from collections.abc import Sequence

from torchtrim.executor.places import module_at, wrong_options
from torchtrim.executor.registry import Handle, Option, Roots, TechniqueUnit, all_or_none
from torchtrim.executor.row_edits import edit_of
from torchtrim.records.plan import Technique
from torchtrim.step.edits import Block, Edit, Need, joined_if_all
from torchtrim.step.step import Step
from torchtrim.techniques.split_time.layers import RecurrentCall, layers_of

_TURN_SECONDS = 1.1e-4  # Measured: a small time step of one layer in one direction, both passes.


class SplitTime(TechniqueUnit):
    """`where` names LSTMs and GRUs."""

    name = "split_time"
    does = "run a few time steps at a time"
    equivalence = "ROUNDING"
    assumes = ("the layer keeps its forward, and drops nothing between layers",)
    unseen = ("nothing writes through `.data` between forward and backward",)

    def options(self, step: Step) -> Sequence[Option]:
        """Return the recurrent layers that take one tensor and draw no random numbers."""
        return [
            Option(self.name, where, tuple(one.span for one in calls))
            for where, calls in layers_of(step).items()
        ]

    def edits(self, step: Step, option: Option) -> Edit | None:
        """Return the edit that keeps gates for a few steps at a time, and the states of a cell throughout."""
        calls = layers_of(step).get(option.where, ())
        return joined_if_all(_edit(step, one) for one in calls)

    def apply(self, roots: Roots, technique: Technique) -> Handle:
        """Give the modules a forward in pieces of time. Raises `ApplyFailed`."""
        from torchtrim.techniques.split_time.running import split

        if technique.options:
            raise wrong_options(technique, "no options")
        return all_or_none(technique.where, lambda where: split(where, module_at(roots, where)))


TECHNIQUE = SplitTime()


def _more_seconds(step: Step, one: RecurrentCall) -> float:
    """Return the modelled time of all its time steps in excess of its recorded tasks, at least 0."""
    now = range(*one.span)
    tasks = {*now, *(n for task in now for n in step.backward.get(task, ()))}
    own: float = sum(step.tasks[n].seconds for n in tasks)
    return max(0.0, one.turns * _TURN_SECONDS - own)


def _edit(step: Step, one: RecurrentCall) -> Edit | None:
    edit = edit_of(step, one.span, 1, within=one.within, seconds=_more_seconds(step, one))
    if edit is None:
        return None
    ends = max(insert.at for insert in edit.inserts) + 1
    kept = (Need(one.result, ends),) if one.result >= 0 else ()
    blocks = (*edit.blocks, Block(one.kept_bytes, one.span.first, ends))
    return edit._replace(blocks=blocks, needs=(*edit.needs, *kept))
