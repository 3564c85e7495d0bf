"""One report says the same on a terminal, as a page, as JSON, as Markdown and in a notebook."""

from __future__ import annotations

import html as markup
import io
import re
from collections.abc import Callable, Iterable, Iterator

import msgspec
import pytest
from rich.console import Console

from report import samples
from report.test_html import Page
from torchtrim.core.units import format_bytes
from torchtrim.records import Report
from torchtrim.report import cell, facts, html, plan_words, sections, terminal
from torchtrim.report.formats import github, json, markdown, sarif
from torchtrim.report.headline import headline
from torchtrim.report.page_title import page_title


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


def figures_in(texts: Iterable[str]) -> list[str]:
    """The sizes and times in sentences, for a form that has other words around them."""
    return [one for text in texts for one in re.findall(r"[\d.]+ (?:[KMG]iB|[mu]?s)\b", text)]


def said_by_the_page(report: Report) -> list[str]:
    """What the page must say: it answers in its own words, with the same figures and verdicts."""
    title = page_title(report)
    lines = [title.first, *title.others, *figures_in(headline(report).parts), report.next]
    lines += figures_in(facts.waiting_lines(report)[:1])
    if report.certificate:
        lines.append(facts.weakest_verdict(report))
        lines.append(facts.proof_sentence(report.certificate).partition(": ")[2])
        lines.append(facts.difference_of(report.certificate, facts.home(report)))
    head, waits = headline(report), facts.waiting_lines(report)
    other_words = {head.word, *head.parts, *(one.partition(", device busy")[0] for one in waits)}
    if report.certificate:
        other_words.add(facts.proof_sentence(report.certificate))
    return [*lines, *(line for line in said(report) if line not in other_words)]


def said(report: Report) -> list[str]:
    """What every form must say of a report."""
    head = headline(report)
    lines = [head.word, *head.parts]
    lines += [finding.code for finding in report.findings[:3]]
    lines += [facts.price(finding) for finding in report.findings[:3]]
    if report.plan:
        lines += [plan_words.where_of(one).partition(":")[0] for one in report.plan.techniques]
    if report.certificate:
        lines.append(facts.proof_sentence(report.certificate))
    return [*lines, *newer(report)]


def newer(report: Report) -> list[str]:
    """What every form must say of fixes, estimates, waits and streams."""
    told = [*sections.estimate_lines(report)]
    told += [line.partition(", device busy")[0] for line in facts.waiting_lines(report)]
    if report.fixes:
        told.append(facts.fix_lines(report)[0])
        states = facts.fix_states(report.fixes)
        told += [f"{states[fix.state]}: {fix.name} at " for fix in report.fixes.places]
    stream = report.stream
    if stream is not None:
        told.append(f"{format_bytes(stream.growth_bytes)} a frame")
        if stream.unbounded_growth_bytes is not None:
            told.append(f"{format_bytes(stream.unbounded_growth_bytes)} without bounds")
    return told


@pytest.mark.parametrize("form", ["page", "markdown", "notebook"])
def test_why_a_fix_was_not_worth_it_is_told_in_full(form: str) -> None:
    text = plain(FORMS[form](samples.FIXED))
    told = [fix.reason for fix in samples.FIXED.fixes.places if fix.reason]
    assert len(told) == 2
    assert [reason for reason in told if plain(reason).strip() not in text] == []


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", REPORTS)
def test_every_form_says_it(name: str, form: str) -> None:
    report = REPORTS[name]
    text = plain(FORMS[form](report)).lower()
    told = said_by_the_page(report) if form == "page" else said(report)
    assert [fact for fact in told if plain(fact).strip().lower() not in text] == []


@pytest.mark.parametrize("name", REPORTS)
def test_json_has_the_figures_behind_the_words(name: str) -> None:
    report = REPORTS[name]
    data = msgspec.json.decode(json.render(report))
    assert msgspec.convert(data, Report) == report
    if report.fixes:
        assert data["fixes"]["syncs_after"] == report.fixes.syncs_after
        assert (
            f"{data['fixes']['syncs_before']} -> {data['fixes']['syncs_after']}"
            in headline(report).word
        )
    if report.stream:
        assert format_bytes(data["stream"]["growth_bytes"]) in headline(report).word
    if report.original and report.memory_kind == "allocated":
        peak = format_bytes(data["original"]["peak_bytes"])
        found = headline(report)
        assert peak in " ".join((found.word, *found.parts))


def strings(value: object) -> Iterator[str]:
    """Every string in a decoded document, keys included."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        yield from strings([*value, *value.values()])
    elif isinstance(value, list):
        for one in value:
            yield from strings(one)


def as_sarif(report: Report) -> str:
    document = msgspec.json.decode(sarif.render(report, root="", line_text=lambda *_: ""))
    return "".join(strings(document))


INERT = {**FORMS, "github": github.render, "sarif": as_sarif}


@pytest.mark.parametrize("form", INERT)
def test_hostile_names_are_inert_in_every_form(form: str) -> None:
    text = INERT[form](samples.HOSTILE_REPORT)
    assert not set(text) & {"\x1b", "\u202e", "\u200f", "\r"}


def test_a_hostile_name_starts_no_command_of_github() -> None:
    poison = "a%0A\n::error::owned\r\n::set-output name=x::y"
    report = msgspec.structs.replace(
        samples.HOSTILE_REPORT,
        findings=(samples.finding("TT201", 1, poison, path=poison),),
        certificate=msgspec.structs.replace(samples.NOT_EQUAL.certificate, reason=poison),
    )
    lines = github.render(report).splitlines()
    assert len(lines) == 2
    assert all(re.match(r"::(error|warning|notice)[ :]", line) for line in lines)


def test_the_raw_page_escapes_what_is_hostile() -> None:
    page = html.render(samples.HOSTILE_REPORT, samples.profile(412, name=samples.HOSTILE), None)
    assert "<script>alert" not in page
    for section in ("stream", "estimate", "fixes"):
        assert f'id="{section}"' in page


def test_one_more_that_is_barely_too_many_says_by_how_much() -> None:
    (growth,) = samples.ESTIMATE.estimated.growth
    near = msgspec.structs.replace(growth, next_bytes=growth.budget_bytes + samples.MIB)
    estimated = msgspec.structs.replace(samples.ESTIMATE.estimated, growth=(near,))
    report = msgspec.structs.replace(samples.ESTIMATE, estimated=estimated)
    assert "22 needs 1.00 MiB more" in sections.estimate_lines(report)[-1]


def test_memory_that_falls_is_told() -> None:
    (growth,) = samples.ESTIMATE.estimated.growth
    falling = msgspec.structs.replace(growth, falls=True, tried=640)
    estimated = msgspec.structs.replace(samples.ESTIMATE.estimated, growth=(falling,))
    report = msgspec.structs.replace(samples.ESTIMATE, estimated=estimated)
    assert "falls somewhere up to 640" in sections.estimate_lines(report)[-1]
