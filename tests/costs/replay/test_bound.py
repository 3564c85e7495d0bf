"""The verdict on what a step depends on."""

import pytest

from torchtrim.costs.replay.bound import bound
from torchtrim.costs.replay.engine import replay
from torchtrim.costs.replay.program import Activity, Does, ReplayProgram, ReplayStep


def alternating(host: float, device: float, waits: bool = True) -> ReplayProgram:
    """The host works, then the device, ten times, with a wait after each or without."""
    program = ReplayProgram(lanes=1, streams=1, activities=10, tails=[0.0])
    for n in range(10):
        launched = (Activity(n, 0, device, 5.0, 1.0),)
        program.steps.append(ReplayStep(Does.LAUNCH, 0, host, 5.0, launched))
        if waits:
            program.steps.append(ReplayStep(Does.WAIT, 0, 0.0, 3.0, awaits=(n,), back=3.0, site=0))
    return program


@pytest.mark.parametrize(
    ("program", "loading", "verdict"),
    [
        (alternating(1000, 30), 0.0, "host"),
        (alternating(1000, 30), 0.5, "loader"),
        (alternating(30, 1000), 0.5, "device"),
        (alternating(600, 500), 0.0, "waits"),
        (alternating(1000, 70), 0.0, "host"),
    ],
)
def test_verdicts(program: ReplayProgram, loading: float, verdict: str) -> None:
    base = replay(program).span
    gained = base - replay(program, {0}).span
    assert bound(program, gained=gained, span=base, loading=loading * base) == verdict


def test_nothing_happened() -> None:
    assert bound(ReplayProgram(), gained=0.0, span=0.0, loading=0.0) == "unknown"
