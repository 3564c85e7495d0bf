"""Findings of source as text."""

from __future__ import annotations

from pathlib import Path

from report import samples
from torchtrim.records import Finding, Report, Suggestion
from torchtrim.report import lint_text
from torchtrim.report.formats import github, sarif


def report_of(*findings: Finding, project: str = "/p") -> Report:
    return Report(
        torchtrim="0",
        torch="2",
        verb="lint",
        device="",
        script=".",
        steps=0,
        project=project,
        findings=findings,
    )


def finding(**more: object):
    given = {"path": "model.py", "count_per_step": 0, **more}
    return samples.finding("TT102", 3, "`x[mask]` waits", **given)


def test_a_line_for_each_with_a_mark_for_its_fix() -> None:
    safe = finding(fix=Suggestion(kind="code", reason="masked_fill", diff=""))
    unsafe = finding(fix=Suggestion(kind="code", reason="unsafe, masked_fill: why", diff=""))
    text = lint_text.concise(report_of(safe, unsafe, finding(fix=None)))
    assert text.splitlines() == [
        "model.py:3: TT102 [*] `x[mask]` waits",
        "model.py:3: TT102 [?] `x[mask]` waits",
        "model.py:3: TT102 `x[mask]` waits",
    ]


def test_lines_of_source_and_the_fix(tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text("import torch\ndef f(x, mask):\n    return x[mask]\n")
    fix = Suggestion(kind="code", reason="a_fix", diff="--- a\n+++ b\n@@ -3 +3 @@\n-old\n+new\n")
    text = lint_text.full(report_of(finding(fix=fix), project=str(tmp_path)))
    assert "     3 >     return x[mask]" in text
    assert "fix: a_fix" in text
    assert "-old\n       +new" in text
    assert "---" not in text


def test_strangers_names_are_harmless() -> None:
    hostile = finding(path=samples.HOSTILE, fix=Suggestion(kind="advice", reason=samples.HOSTILE))
    for text in (lint_text.concise(report_of(hostile)), lint_text.full(report_of(hostile))):
        assert "\x1b" not in text
        assert "\u202e" not in text


def test_machines_are_told_no_count_that_nobody_took() -> None:
    report = report_of(finding(fix=Suggestion(kind="advice", reason="keep it")))
    assert "a step" not in github.render(report)
    assert "`x[mask]` waits. Keep it." in sarif.render(report)
