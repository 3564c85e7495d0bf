"""Evidence on the values at a place, over several executions."""

from __future__ import annotations

import pytest

from torchtrim.records.probes import Execution, ObservedValue, ProbeResult
from torchtrim.source.facts import Facts, FixRefused


def facts(*shapes: dict[str, tuple[int, ...]]) -> Facts:
    executions = tuple(
        Execution(
            values={name: ObservedValue(kind="tensor", shape=shape) for name, shape in one.items()},
            grad=True,
        )
        for one in shapes
    )
    return Facts(ProbeResult(number=0, executions=executions))


def test_what_executions_have_in_common() -> None:
    assert facts({"X": (2, 3)}, {"X": (4, 3)}).only("the rank", lambda v: len(v.X.shape), 9) == 2
    with pytest.raises(FixRefused, match="the rank differs between"):
        facts({"X": (2, 3)}, {"X": (4,)}).only("the rank", lambda v: len(v.X.shape), 9)
    assert Facts().only("the rank", lambda v: len(v.X.shape), 9) == 9
    assert facts({"Y": ()}).only("the rank", lambda v: len(v.X.shape), 9) == 9


def test_a_part_that_was_computed_once_only_is_told() -> None:
    found = facts({"X": (1,), "L": (2,)}, {"X": (1,)})
    assert [one.has("L") for one in found.executions] == [True, False]
