"""The first screen: what was wrong, what was done, whether it is safe, what to type."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from report import samples
from report.test_headline import with_fixes
from report.test_html import Page
from torchtrim.records import Report
from torchtrim.records.plan import Prediction
from torchtrim.report.answers import answers, fixes_verdict
from torchtrim.report.html import render

NOTHING = replace(
    samples.OPTIMIZE,
    planned=None,
    certificate=None,
    budget_bytes=500 * samples.MIB,
    plan=replace(samples.PLAN, techniques=(), predicted=Prediction(peak_bytes=1, step_seconds=0.6)),
)


def said(report: Report) -> dict[str, str]:
    return {one.question: " ".join(one.lines) for one in answers(report)}


def test_a_plan_that_fits_has_all_answers() -> None:
    found = said(samples.OPTIMIZE)
    assert "peaks at 412 MiB, 165 MiB over the budget of 247 MiB." in found["What was wrong"]
    assert found["What was wrong"].endswith(
        "Activations are the largest part, 260 MiB, of which 120 MiB at `models/encoder.py:42` in "
        "`model.encoder.layers.3.attention`."
    )
    assert "recompute" in found["What was done"]
    assert found["Is it safe"].startswith("Every compared bit is equal.")


def test_what_was_not_done_is_not_said_to_be_done() -> None:
    assert said(NOTHING)["What was done"] == "Nothing: the program ran as it is."
    assert said(NOTHING)["What was wrong"].startswith("Nothing: the step peaks at 412 MiB, within")
    assert "Is it safe" not in said(NOTHING)
    assert said(samples.PLANNING)["What was done"].startswith("Planned, and not tried yet:")
    assert said(samples.PLANNING)["Is it safe"].startswith("Not known yet")
    assert said(samples.MISSED)["What was done"].startswith("The plan that needs least was tried:")
    assert (
        said(samples.FIXED)["What was done"] == "1 fix (masked_fill), suggested, not written yet."
    )


def test_a_failed_proof_says_where_it_fails() -> None:
    assert "do not use it" in said(samples.NOT_EQUAL)["Is it safe"]
    assert "models/encoder.py:43" in said(samples.NOT_EQUAL)["Is it safe"]
    assert "index_add on several threads" in said(samples.UNDECIDED)["Is it safe"]


def test_syncs_are_named_by_their_lines() -> None:
    wrong = said(samples.FIXED)["What was wrong"]
    assert wrong.startswith(
        "The host waits for the device 4 times a step, at `models/encoder.py:43` and "
        "`train.py:97` and 99: "
    )
    assert "waits cost 1.52 ms of a step of 11.9 ms on A10G, modelled" in wrong


def test_a_claim_of_rounding_does_not_call_everything_identical() -> None:
    report = with_fixes(replace(samples.FIXED), "ROUNDING")
    answer = next(one for one in answers(report) if one.verdict)
    assert answer.verdict == "ROUNDING"
    assert "In this run, every gradient" in " ".join(answer.lines)


def test_fixes_beside_a_plan_have_their_own_verdict() -> None:
    beside = replace(samples.OPTIMIZE, fixes=samples.FIXED.fixes)
    assert fixes_verdict(beside) == "BITWISE"
    assert fixes_verdict(with_fixes(beside, "ROUNDING")) == "ROUNDING"
    assert fixes_verdict(samples.FIXED) == fixes_verdict(samples.OPTIMIZE) == ""


@pytest.mark.parametrize("name", samples.ALL)
def test_the_page_answers_ahead_of_everything_else(name: str) -> None:
    report = replace(samples.ALL[name], next="torchtrim run train.py")
    header = render(report, None, None).partition("<main>")[0]
    text = Page(header + "</body></html>").text
    assert [one.question for one in answers(report) if one.question not in text] == []
    assert "torchtrim run train.py" in text
