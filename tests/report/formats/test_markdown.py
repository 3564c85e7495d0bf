from __future__ import annotations

import html
import re

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from report import samples
from torchtrim.records.allow import AllowedFinding
from torchtrim.report import facts
from torchtrim.report.blocks import escape
from torchtrim.report.formats import markdown
from torchtrim.report.headline import headline
from torchtrim.report.safe import clean
from torchtrim.report.sections import figure_rows

MENTION = re.compile(r"@\w|#\w|://|www\.", re.IGNORECASE)


@pytest.mark.parametrize("name", samples.ALL)
def test_it_has_the_facts_of_the_other_outputs(name: str) -> None:
    report = samples.ALL[name]
    text = html.unescape(markdown.render(report)).replace("\u200b", "")
    assert text.startswith(f"## torchtrim: {headline(report).word}\n")
    heads, rows = figure_rows(report)
    assert all(head in text for head in heads)
    for row in rows if heads else ():
        assert f"| {row.name} | {' | '.join(row.cells)} |" in text
    for finding in report.findings:
        assert f"| {finding.code} |" in text
        assert facts.price(finding) in text
    if report.certificate:
        assert clean(facts.certificate_lines(report.certificate)[1]) in text


def test_a_finding_is_a_row_with_place_count_and_price() -> None:
    row = next(x for x in markdown.render(samples.DIAGNOSE).splitlines() if "TT301" in x)
    assert row == (
        "| TT301 | <code>train.py:60</code> | 1 | 41.0 ms "
        "| the step waits for its loader, which has no workers |"
    )


def test_it_counts_what_is_allowed() -> None:
    allowed = AllowedFinding(code="TT101", path="train.py", line=97, line_text="x", count=3, used=3)
    report = msgspec.structs.replace(
        samples.DIAGNOSE, project="/home/ana/segmenter", allowed=(allowed,)
    )
    assert "| 4 (3 allowed) |" in markdown.render(report)


def test_every_row_of_a_table_has_as_many_cells() -> None:
    text = markdown.render(samples.HOSTILE_REPORT)
    for table in re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE):
        assert len({line.count("|") for line in table.splitlines()}) == 1


@pytest.mark.parametrize("times", [1, 30, 400, pytest.param(4000, marks=pytest.mark.slow)])
def test_it_is_never_larger_than_github_takes(times: int) -> None:
    findings = samples.HOSTILE_REPORT.findings * times
    report = msgspec.structs.replace(
        samples.HOSTILE_REPORT, findings=findings, notes=("@" * 10**5,) * 50
    )
    text = markdown.render(report)
    assert len(text.encode()) <= markdown.MOST_BYTES
    shown = text.count("<code>")
    assert shown
    if shown < len(findings):
        assert f"and {len(findings) - shown} more" in text


def test_hostile_names_are_inert() -> None:
    text = markdown.render(samples.HOSTILE_REPORT)
    assert "<script" not in text
    assert not any(poison in text for poison in ("\x1b", "\u202e", "\u200f", "\r"))
    assert set(re.findall(r"<[^>]*>", text)) <= {"<code>", "</code>", "<sub>", "</sub>"}


@given(st.text(max_size=290))
def test_any_text_shows_as_it_is(text: str) -> None:
    escaped = escape(text)
    assert html.unescape(escaped).replace("\u200b", "") == clean(text)
    assert "\n" not in escaped


@given(st.text(alphabet="@#:/w.W<>|`*_[]()~$&;\\ax1 ", max_size=60))
def test_no_text_has_markup_mentions_or_links(text: str) -> None:
    escaped = escape(text)
    plain = re.sub(r"&#\d+;", " ", escaped)
    assert not re.search(r"[<>\\`*_\[\]|~$&]", plain)
    assert not MENTION.search(html.unescape(escaped))
