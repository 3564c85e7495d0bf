"""The peak of a step is that of torch's own allocator events, to the byte."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest
from bench.truth import by_events

from steps import quiet
from torchtrim import Script
from torchtrim.records.trial import Request
from torchtrim.workflows.optimize.fitting import Fitting

PROGRAMS = Path(__file__).parents[2] / "bench" / "truth"
QUICK = "average", "sparse"


@pytest.mark.parametrize(
    "name",
    [
        path.stem if path.stem in QUICK else pytest.param(path.stem, marks=pytest.mark.slow)
        for path in sorted(PROGRAMS.glob("*.py"))
    ],
)
def test_peaks_are_those_of_allocator_events(name: str) -> None:
    path = PROGRAMS / f"{name}.py"
    expected = by_events(lambda: runpy.run_path(str(path), run_name="__main__"))
    trial = Fitting(Script(str(path), device="cpu"), Request(), quiet).observe()
    assert trial.profile is not None
    assert max(step.peak_bytes for step in trial.steps) == expected
    if name == "sparse":  # A dry run's gradients are dense, which SparseAdam refuses.
        return
    estimated = Fitting(Script(str(path), device="cpu"), Request(dry=True), quiet).observe().profile
    assert estimated is not None
    assert estimated.peak_bytes == pytest.approx(expected, rel=0.01)
