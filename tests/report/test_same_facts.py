"""One report says the same on a terminal, as a page, as JSON, as Markdown and in a notebook."""

from __future__ import annotations

import html as markup
import io
import re
from collections.abc import Callable

import msgspec
import pytest
from rich.console import Console

from report import samples
from report.test_html import Page
from torchtrim.records import Report
from torchtrim.report import cell, facts, html, json, markdown, terminal
from torchtrim.units import format_bytes


def on_a_terminal(report: Report) -> str:
    out = io.StringIO()
    terminal.render(report, Console(file=out, width=120), next_command=None)
    return out.getvalue()


def as_a_page(report: Report) -> str:
    before = samples.profile(412) if report.original else None
    return Page(html.render(report, before, None)).text


def as_markdown(report: Report) -> str:
    return markup.unescape(markdown.render(report))


def in_a_notebook(report: Report) -> str:
    return Page(cell.html(report)).text


FORMS: dict[str, Callable[[Report], str]] = {
    "terminal": on_a_terminal,
    "page": as_a_page,
    "markdown": as_markdown,
    "notebook": in_a_notebook,
    "notebook text": cell.text,
}
REPORTS = {name: report for name, report in samples.ALL.items() if name != "hostile"}


def plain(text: str) -> str:
    """Without what forms write each in their own way: breaks, arrows, signs, marks."""
    text = text.replace("\N{RIGHTWARDS ARROW}", "->").replace("\N{PLUS-MINUS SIGN}", "+-")
    return re.sub(r"[\s`\u200b,]+|</?code>", " ", text)


def said(report: Report) -> list[str]:
    """What every form must say of a report."""
    head = facts.headline(report)
    lines = [head.word, *head.parts]
    lines += [finding.code for finding in report.findings[:3]]
    lines += [facts.price(finding) for finding in report.findings[:3]]
    if report.plan:
        lines += [facts.where_of(one).partition(":")[0] for one in report.plan.techniques]
    if report.certificate:
        lines += [report.certificate.verdict, str(report.certificate.compared[0])]
    return lines


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", REPORTS)
def test_every_form_says_it(name: str, form: str) -> None:
    report = REPORTS[name]
    text = plain(FORMS[form](report))
    assert [fact for fact in said(report) if plain(fact).strip() not in text] == []


@pytest.mark.parametrize("name", REPORTS)
def test_json_has_the_figures_behind_the_words(name: str) -> None:
    report = REPORTS[name]
    data = msgspec.json.decode(json.render(report))
    assert msgspec.convert(data, Report) == report
    if report.original and report.memory_kind == "allocated":
        peak = format_bytes(data["original"]["peak_bytes"])
        assert peak in facts.headline(report).parts[0]


@pytest.mark.parametrize("form", FORMS)
def test_hostile_names_are_inert_in_every_form(form: str) -> None:
    text = FORMS[form](samples.HOSTILE_REPORT)
    assert not set(text) & {"\x1b", "\u202e", "\u200f", "\r"}
