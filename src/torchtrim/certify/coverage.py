"""For which shapes, types, modes and steps a verdict was shown."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

from torchtrim.records.certificate import Coverage
from torchtrim.records.trial import Call, Trial

_MOST = 24


def coverage_of(trial: Trial) -> Coverage:
    """What the steps of a trial were given."""
    calls = list(dict.fromkeys(call for step in trial.steps for call in step.calls))
    inputs = [one for call in calls for one in call.inputs]
    shapes = [_shape(one) for one in inputs]
    modes: dict[bool, Literal["training", "evaluation"]] = {True: "training", False: "evaluation"}
    rank = trial.profile.rank if trial.profile is not None else 0
    return Coverage(
        inputs=tuple(f"{call.root}: {', '.join(call.inputs) or 'no tensor'}" for call in calls)[
            :_MOST
        ],
        dtypes=tuple(sorted({one.partition("[")[0] for one in inputs})),
        batch_sizes=tuple(sorted({*_batch_sizes(calls)})),
        dimensions=tuple(sorted({len(shape) for shape in shapes})),
        modes=tuple(modes[one] for one in dict.fromkeys(call.training for call in calls)),
        steps=len(trial.steps),
        device=trial.device,
        processes=(rank,),
    )


def _batch_sizes(calls: Iterable[Call]) -> Iterable[int]:
    """The first dimension of the first input that has one, of each call."""
    for call in calls:
        if first := next((shape for one in call.inputs if (shape := _shape(one))), ()):
            yield first[0]


def _shape(text: str) -> tuple[int, ...]:
    """`"float32[8, 3]"` -> `(8, 3)`."""
    inner = text.partition("[")[2].rstrip("]")
    return tuple(int(size) for size in inner.split(",")) if inner else ()
