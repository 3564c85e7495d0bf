"""A headline is a sentence, and never stronger than its weakest part."""

from __future__ import annotations

import msgspec

from report import samples
from torchtrim.records import Report
from torchtrim.records.finding import Equivalence
from torchtrim.report.facts import coverage_sentence, fix_lines, proof_sentence
from torchtrim.report.headline import headline
from torchtrim.report.html import render

ROUNDING = msgspec.structs.replace(samples.BITWISE, verdict="ROUNDING", largest_difference=1e-7)


def with_fixes(report: Report, equivalence: Equivalence, *, written: bool = False) -> Report:
    assert samples.FIXED.fixes is not None
    first, *_ = samples.FIXED.fixes.places
    places = (first, msgspec.structs.replace(first, equivalence=equivalence))
    fixes = msgspec.structs.replace(samples.FIXED.fixes, places=places, written=written)
    return msgspec.structs.replace(report, fixes=fixes)


def test_a_plan_that_fits_says_what_its_results_are() -> None:
    assert headline(samples.OPTIMIZE).word == (
        "Fits: peak 412 MiB -> 236 MiB (-43 %), results identical bit for bit"
    )


def test_a_script_that_compiles_is_measured_compiled() -> None:
    report = msgspec.structs.replace(samples.DIAGNOSE, compiled=samples.figures(300, 0.25, 0.0))
    said = headline(report)
    assert "peak 300 MiB compiled, 412 MiB eagerly" in said.word
    assert said.parts[0].startswith("step 250 ms compiled, ")


def test_written_fixes_that_round_do_not_hide_behind_an_identical_plan() -> None:
    word = headline(with_fixes(samples.OPTIMIZE, "ROUNDING", written=True)).word
    assert word.endswith(
        "results identical bit for bit; 2 fixes written, equal up to rounding (here identical bit for "
        "bit), syncs 4 -> 1 a step"
    )


def test_suggested_fixes_do_not_speak_for_a_plan() -> None:
    report = with_fixes(samples.OPTIMIZE, "ROUNDING")
    assert headline(report) == headline(samples.OPTIMIZE)
    assert fix_lines(report)[0].startswith("2 suggested, nothing written")


def test_a_technique_that_rounds_is_no_identity_though_this_run_was_equal() -> None:
    plan = samples.PLAN
    rounding = msgspec.structs.replace(plan.techniques[0], equivalence="ROUNDING")
    report = msgspec.structs.replace(
        samples.OPTIMIZE, plan=msgspec.structs.replace(plan, techniques=(rounding,))
    )
    assert "results equal up to rounding" in headline(report).word
    assert "identical" not in headline(report).word


def test_fixes_alone_are_the_sentence() -> None:
    found = headline(with_fixes(samples.FIXED, "BITWISE", written=True))
    assert found.word == "2 fixes written, identical bit for bit, syncs 4 -> 1 a step"
    assert "peak 412 MiB" in found.parts


def test_fixes_that_measured_rounding_are_not_called_identical() -> None:
    report = with_fixes(samples.FIXED, "BITWISE")
    assert report.fixes is not None
    report = msgspec.structs.replace(
        report,
        certificate=ROUNDING,
        fixes=msgspec.structs.replace(report.fixes, certificate=ROUNDING),
    )
    assert "identical" not in headline(report).word


def test_a_missed_budget_leads_with_the_smallest_and_why() -> None:
    assert headline(samples.MISSED).word.startswith(
        "Does not fit 100 MiB: the smallest budget is 236 MiB (57 %), set by activations of"
    )


def test_what_is_not_equal_never_fits() -> None:
    assert headline(samples.NOT_EQUAL).word.startswith("NOT EQUAL: ")
    assert headline(samples.NOT_EQUAL).tone == "bad"


def test_scripts_keep_their_word() -> None:
    verdicts = {name: headline(report).verdict for name, report in samples.ALL.items()}
    assert verdicts["optimize"] == "BITWISE"
    assert verdicts["missed"] == "BITWISE, BUDGET MISSED"
    assert verdicts["stream"] == "GROWS"
    assert verdicts["estimate"] == "FITS"


def test_the_word_for_machines_and_the_page_are_no_stronger_than_a_fix() -> None:
    report = with_fixes(samples.OPTIMIZE, "ROUNDING", written=True)
    assert headline(report).verdict == "ROUNDING"
    assert '<span class="pill good">ROUNDING</span>' in render(report, None, None)
    assert headline(samples.OPTIMIZE).verdict == "BITWISE"


def test_a_certificate_says_what_it_was_shown_for() -> None:
    assert samples.BITWISE.coverage is not None
    sentence = coverage_sentence(samples.BITWISE.coverage)
    assert sentence == (
        "Shown for Net: float32[16, 3, 224, 224] (batch 16), in training, 3 steps on cpu; "
        "not for other shapes, types or modes"
    )
    assert sentence in render(samples.OPTIMIZE, None, None)


def test_quantities_of_fewer_steps_are_said_to_be_of_the_same_steps() -> None:
    compared = (
        "1 loss x 4 steps",
        "9 gradients x 4 steps",
        "9 parameters x 5 steps",
        "7 calls x 4 steps",
    )
    proof = msgspec.structs.replace(samples.BITWISE, compared=compared, steps=5)
    assert proof_sentence(proof) == (
        "BITWISE: every parameter of 5 steps, every loss and gradient of 4 of them: identical"
    )
    alone = msgspec.structs.replace(proof, compared=("2 losses x 1 steps",))
    assert proof_sentence(alone) == "BITWISE: every loss of 1 step: identical"
