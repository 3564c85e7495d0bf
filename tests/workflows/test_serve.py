"""Scripts that only run their models: planned, measured as foretold, and proved."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest

from torchtrim.api import Result, optimize_calls_report, verify_report
from torchtrim.errors import UsageError
from torchtrim.records.trial import Request
from torchtrim.runner.script import Script

SCRIPT = str(Path(__file__).parent.parent / "scripts" / "calls.py")


@functools.cache
def optimized(kind: str, memory: str | None = None) -> Result:
    return optimize_calls_report(Script(SCRIPT, (kind,)), memory, Request(steps=2))


@pytest.mark.parametrize("kind", ["plain", pytest.param("two", marks=pytest.mark.slow)])
def test_less_memory_as_foretold_and_every_bit_agrees(kind: str) -> None:
    report = optimized(kind).report
    assert report.certificate is not None
    assert report.certificate.verdict == "BITWISE"
    assert report.original is not None
    assert report.planned is not None
    assert report.plan is not None
    # The kernels' scratch, which no plan touches, differs from machine to machine.
    assert report.planned.peak_bytes < 0.85 * report.original.peak_bytes
    if kind == "plain":
        assert report.plan.predicted.peak_bytes == pytest.approx(
            report.planned.peak_bytes, rel=0.05
        )
    assert report.budget_bytes is None


@pytest.mark.slow
def test_a_budget_below_takes_parts_of_the_batch_and_its_plan_verifies() -> None:
    result = optimized("plain", "40%")
    report = result.report
    assert report.planned is not None
    assert report.planned.peak_bytes <= (report.budget_bytes or 0)
    assert "split_batch" in [one.name for one in report.plan.techniques]
    assert report.certificate.verdict in ("BITWISE", "ROUNDING")
    again = verify_report(Script(SCRIPT, ("plain",)), result.plan, Request(steps=1)).report
    assert again.certificate.verdict == report.certificate.verdict
    assert again.planned.peak_bytes == report.planned.peak_bytes


@pytest.mark.slow
def test_a_budget_that_nothing_meets_says_what_would() -> None:
    result = optimized("plain", "1KiB")
    report = result.report
    assert report.floor_bytes is not None
    assert report.floor_bytes < report.original.peak_bytes
    assert report.certificate.verdict in ("BITWISE", "ROUNDING")
    assert report.planned.peak_bytes == report.floor_bytes
    assert result.plan is not None


@pytest.mark.parametrize(
    ("kind", "said"),
    [("branches", "module by module"), ("trainmode", "Net is in training mode")],
)
def test_what_has_no_plan_of_the_whole_says_why_and_is_equal(kind: str, said: str) -> None:
    report = optimized(kind).report
    assert any(said in note for note in report.notes)
    assert report.certificate.verdict == "BITWISE"


def test_a_script_that_trains_is_refused() -> None:
    with pytest.raises(UsageError, match="the script trains"):
        optimized("trains")
    with pytest.raises(UsageError, match="--device h100"):
        optimize_calls_report(Script(SCRIPT, ("plain",), device="h100"), None, Request())
