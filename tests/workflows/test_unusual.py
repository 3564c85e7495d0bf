"""Scripts without an optimizer, with compiled models, without a backward, with processes of their own."""

from __future__ import annotations

from pathlib import Path

import pytest

from torchtrim.api import diagnose_report, optimize_report
from torchtrim.errors import NothingTrains, ScriptFailed
from torchtrim.records.report import Result
from torchtrim.records.terms import BITWISE
from torchtrim.records.trial import Request
from torchtrim.runner.compiling import EAGERLY
from torchtrim.runner.script import Script
from torchtrim.workflows.diagnose import TAKEN_AS_CALLS

SCRIPT = str(Path(__file__).parent.parent / "scripts" / "unusual.py")


def diagnosed(kind: str) -> Result:
    return diagnose_report(Script(SCRIPT, (kind,)), Request(steps=1))


def test_updates_by_hand_end_a_step() -> None:
    result = diagnosed("by-hand")
    assert result.before is not None
    assert {op.phase for op in result.before.operators} >= {"forward", "backward"}
    assert any("changed parameters itself" in note for note in result.report.notes)


@pytest.mark.slow
def test_a_compiled_model_is_planned_as_it_runs_eagerly() -> None:
    pinned = BITWISE._replace(pins={"never": ("replay:*",)})  # pins are of eager plans
    result = optimize_report(Script(SCRIPT, ("compiled",)), "90%", Request(steps=1), terms=pinned)
    report = result.report
    assert EAGERLY in report.notes
    assert result.before is not None
    assert any("tanh" in op.name for op in result.before.operators)
    assert report.certificate is None or report.certificate.verdict == "BITWISE"


def test_a_script_without_backward_is_one_of_calls() -> None:
    report = diagnosed("calls").report
    assert report.original is not None
    assert TAKEN_AS_CALLS in report.notes


def test_training_in_other_processes_is_said_and_not_taken_for_calls() -> None:
    with pytest.raises(ScriptFailed, match="of its own and trained nothing") as caught:
        diagnosed("processes")
    assert not isinstance(caught.value, NothingTrains)
