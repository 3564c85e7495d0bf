"""Folded time: the loader gone, gaps cut to what the timed step has room for, nothing else moved."""

from __future__ import annotations

from itertools import pairwise

import pytest
from msgspec.structs import replace

from profiles import Step
from torchtrim.records.profile import LoaderWait, Profile
from torchtrim.report.folds import folded
from torchtrim.report.lanes import lanes


def recorded() -> Profile:
    """Operators of 0.1 s, with the recorder's gaps of 0.05, 2 and 1 s, and a loader of 0.5 s at the end."""
    step = Step()
    weight = step.alive("parameter", 400)
    with step.module("net", "Net"):
        for gap in (0.05, 2.0, 1.0, 0.0):
            step.op("aten::mul", weight, makes=100, seconds=0.1)
            step.idle(gap)
    step.op("aten::stack", makes=100, seconds=0.1, phase="loader")
    return replace(step.profile(), waits=[LoaderWait(3.55, 0.5, 0)])


def test_gaps_are_cut_to_the_time_without_the_recorder() -> None:
    profile = recorded()
    found = folded(profile, lanes(None, profile), 1.35)  # 0.4 s of operators, 0.6 s of loader.
    starts = [span.start for span in found.lanes.host]
    assert starts == pytest.approx([0.0, 0.15, 0.4, 0.65])  # 0.35 s: 0.05, twice 0.15.
    assert found.lanes.seconds == pytest.approx(0.75)
    assert found.gap_seconds == pytest.approx(3.0 - 0.3)
    assert found.loader_seconds == pytest.approx(0.6)
    assert "of the loader and 2.70 s of the recorder" in found.caption


def test_a_step_as_long_as_timed_keeps_its_gaps() -> None:
    profile = recorded()
    drawn = lanes(None, profile)
    found = folded(profile, drawn, 100.0)
    assert found.gap_seconds == 0.0
    kept = [span for span in drawn.host if profile.operators[span.index].phase != "loader"]
    assert [s.start for s in found.lanes.host] == pytest.approx([s.start for s in kept])


@pytest.mark.parametrize("timed", [0.0, 0.2, 0.7, 1.1, 3.0])
def test_operators_keep_their_times_and_order(timed: float) -> None:
    profile = recorded()
    found = folded(profile, lanes(None, profile), timed)
    assert [span.seconds for span in found.lanes.host] == pytest.approx([0.1] * 4)
    assert all(a.start + a.seconds <= b.start + 1e-9 for a, b in pairwise(found.lanes.host))
    assert all(0 <= time <= found.lanes.seconds for time, _, _ in found.lanes.memory)
    (module,) = found.lanes.modules[0]
    assert module.start + module.seconds == pytest.approx(found.lanes.seconds)


def test_a_step_without_a_loader_has_nothing_to_fold() -> None:
    step = Step()
    step.op("aten::mul", makes=100, seconds=0.1)
    profile = step.profile()
    found = folded(profile, lanes(None, profile), 0.0)
    assert found.caption == ""
    assert found.lanes.seconds == pytest.approx(0.1)
