import io

import msgspec
import pytest
from msgspec.structs import replace
from rich.console import Console

from profiles import training_step
from report import samples
from torchtrim.records.comparison import Comparison
from torchtrim.report import compare_text
from torchtrim.report.changes import compare

REPORT = samples.DIAGNOSE


def measured(seconds: float, spread: float, peak: int = 412, steps: int = 5, **more: object):
    assert REPORT.original is not None
    figures = replace(
        REPORT.original,
        step_seconds=seconds,
        spread_seconds=spread,
        peak_bytes=peak * samples.MIB,
    )
    return replace(REPORT, original=figures, steps=steps, **more)


def judged(found: Comparison) -> dict[str, str]:
    return {change.name: change.judged for change in found.changes}


def printed(found: Comparison, width: int = 80) -> str:
    out = io.StringIO()
    compare_text.render(found, Console(file=out, width=width))
    return out.getvalue()


def test_a_change_within_the_spread_is_none() -> None:
    found = compare(measured(0.60, 0.04), measured(0.62, 0.04), "a", "b")
    assert judged(found)["step"] == "no significant change"
    assert compare_text.headline(found) == "no significant change"
    assert "no significant change, +3 % +- 7 %" in printed(found)
    slower = compare(measured(0.60, 0.04), measured(0.70, 0.04), "a", "b")
    assert judged(slower)["step"] == "more"
    assert "+100.0 ms (+17 % +- 7 %)" in printed(slower)


def test_one_timed_step_tells_no_spread() -> None:
    found = compare(measured(0.6, 0, steps=1), measured(0.9, 0, steps=1), "a", "b")
    assert judged(found)["step"] == "unknown"
    assert "spread unknown" in printed(found)
    assert any("--steps" in note for note in found.notes)


def test_bytes_do_not_vary_but_those_of_the_process_do() -> None:
    found = judged(compare(measured(0.6, 0), measured(0.6, 0, peak=400), "a", "b"))
    assert found["peak"] == "less"
    assert found["process peak"] == "no significant change"


def test_findings_that_came_went_and_moved() -> None:
    first, second, third, *_ = samples.FINDINGS
    moved = replace(first, line=first.line + 9, price_bytes=9 * samples.MIB)
    after = measured(0.6, 0, findings=(moved, third))
    found = compare(measured(0.6, 0, findings=(first, second)), after, "a", "b")
    assert {(f.change, f.finding.code) for f in found.findings} == {
        ("kept", first.code),
        ("gone", second.code),
        ("new", third.code),
    }
    text = printed(found)
    assert "74.0 MiB -> 9.00 MiB" in text
    assert f"+ {third.code}" in text
    assert f"- {second.code}" in text
    assert "1 new finding, 1 gone" in compare_text.headline(found)


def test_profiles_are_judged_too() -> None:
    one, other = training_step(4, device="emulated"), training_step(6, device="emulated")
    found = compare(one, other, "a", "b")
    assert judged(found)["peak"] == "more"
    assert judged(found)["operators"] == "more"
    assert judged(compare(one, one, "a", "b"))["peak"] == "no significant change"


def test_other_devices_are_said() -> None:
    found = compare(REPORT, replace(REPORT, device="emulated"), "a", "b")
    assert any("device differs" in note for note in found.notes)


@pytest.mark.parametrize("width", [60, 80, 200])
def test_hostile_names_are_inert_and_lines_fit(width: int) -> None:
    found = compare(REPORT, samples.HOSTILE_REPORT, samples.HOSTILE, "b")
    text = printed(found, width)
    assert "\x1b" not in text
    assert "\u202e" not in text
    assert all(len(line) <= max(width, 60) for line in text.splitlines())
    assert "<script>" not in compare_text.markdown(found)


def test_it_is_json_and_markdown() -> None:
    found = compare(measured(0.6, 0.02), measured(0.7, 0.02), "a", "b")
    assert msgspec.json.decode(msgspec.json.encode(found), type=Comparison) == found
    assert "| step | 600 ms | 700 ms | &#43;" in compare_text.markdown(found).replace("+", "&#43;")
