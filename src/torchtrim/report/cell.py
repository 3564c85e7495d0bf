"""Renders records for a notebook: as HTML without scripts, and as text."""

from __future__ import annotations

import io
from collections.abc import Iterable, Sequence
from typing import Any

from markupsafe import Markup
from rich.console import Console

from torchtrim.core.units import format_bytes, format_seconds
from torchtrim.records import Certificate, Finding, Plan, Profile, Report
from torchtrim.report import facts, plan_words, sections, terminal
from torchtrim.report.charts import layer_paths, picture
from torchtrim.report.headline import headline
from torchtrim.report.safe import clean, wrap
from torchtrim.report.sections import figure_rows

_WIDTH = 80  # The usual width of a terminal; notebooks do not report theirs.
_MOST_ROWS = 20  # Arbitrary; a cell stays shorter than a screen.
_MOST_CHARACTERS = 300  # Arbitrary; three lines of a cell.
_PICTURE = (640, 150)
_COLOURS = {
    "parameter": "#3f66a6",
    "buffer": "#8196b5",
    "optimizer_state": "#6a9be0",
    "gradient": "#3f9d78",
    "gathered": "#5fb0b7",
    "input": "#bfa23a",
    "activation": "#dd7638",
    "temporary": "#bd5a8c",
    "workspace": "#8c7fb5",
}
_TONES = {"good": "#17734a", "bad": "#b3302a", "unsure": "#8a5d00", "neutral": "inherit"}
NotebookRecord = Report | Profile | Finding | Plan | Certificate


def html(record: NotebookRecord) -> str:
    """Return a record as HTML that has no script, loads nothing and escapes every name."""
    return Markup('<div style="max-width:60rem;overflow-x:auto">{}</div>').format(
        Markup().join(_blocks(record))
    )


def text(record: NotebookRecord) -> str:
    """Return a record as text of at most 80 columns, for notebooks without HTML."""
    if isinstance(record, Report):
        out = io.StringIO()
        console = Console(file=out, width=_WIDTH)
        terminal.render(record, console, next_command=None, whole="the fields of the report")
        return out.getvalue().rstrip("\n")
    return "\n".join(
        piece for line in _text_lines(record) for piece in wrap(_clipped(line), _WIDTH)
    )


def _text_lines(record: Profile | Finding | Plan | Certificate) -> Iterable[str]:
    if isinstance(record, Profile):
        return profile_lines(record)
    if isinstance(record, Finding):
        where = facts.place(record.path, record.line)
        head = "  ".join(part for part in (record.code, where, facts.price(record)) if part)
        fix = [record.fix.reason] if record.fix and record.fix.reason else []
        return [head, record.message, *fix]
    if isinstance(record, Plan):
        head = (
            f"plan for {format_bytes(record.budget_bytes)}: predicted peak "
            f"{format_bytes(record.predicted.peak_bytes)}, "
            f"step {format_seconds(record.predicted.step_seconds)}"
        )
        return [head, *map(plan_words.technique_line, record.techniques)]
    return [record.verdict, *facts.certificate_lines(record)]


def _blocks(record: NotebookRecord) -> Iterable[Markup]:
    if isinstance(record, Report):
        return _report(record)
    if isinstance(record, Finding):
        return [_findings([record])]
    if isinstance(record, Certificate):
        verdict = _coloured(record.verdict, facts.tone_of(record))
        return [verdict, _lines(facts.certificate_lines(record))]
    chart = [_chart(record)] if isinstance(record, Profile) else []
    return [_lines(_text_lines(record), bold=True), *chart]


def profile_lines(profile: Profile) -> list[str]:
    """Return three lines on a profile: its script, its peak and step time, its counts."""
    return [
        f"profile of {profile.script or 'a call'} on {profile.device}",
        f"peak {format_bytes(profile.peak_bytes)}, "
        f"step {format_seconds(profile.step_seconds)} with the recorder",
        f"{len(profile.operators)} operators, {len(profile.modules)} modules, "
        f"{len(profile.syncs)} host-device syncs",
    ]


def _report(report: Report) -> Iterable[Markup]:
    head = headline(report)
    yield _coloured(head.word, head.tone)
    yield _lines(head.parts)
    heads, rows = figure_rows(report)
    yield _table(["", *heads], [[row.name, *row.cells] for row in rows])
    yield _findings(report.findings, facts.home(report))
    proof = facts.certificate_lines(report.certificate) if report.certificate else []
    lines = [
        *sections.estimate_lines(report),
        *facts.waiting_lines(report),
        *facts.fix_lines(report),
        *plan_words.plan_lines(report),
        *proof,
    ]
    yield _lines([*lines, *report.notes])


def _findings(findings: Sequence[Finding], home: str = "") -> Markup:
    rows = [
        [
            finding.code,
            facts.place(finding.path, finding.line, home),
            facts.price(finding),
            finding.message,
            finding.fix.reason if finding.fix else "",
        ]
        for finding in findings[:_MOST_ROWS]
    ]
    more = len(findings) - len(rows)
    table = _table(["code", "place", "price a step", "what", "fix"], rows)
    return table + (_lines([f"+{more} more in `findings`"]) if more > 0 else Markup())


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> Markup:
    if not rows:
        return Markup()
    cell = Markup('<td style="text-align:left">{}</td>')
    body = (Markup("<tr>{}</tr>").format(_joined(cell, row)) for row in rows)
    top = _joined(Markup('<th style="text-align:left">{}</th>'), heads)
    return Markup("<table><thead><tr>{}</tr></thead><tbody>{}</tbody></table>").format(
        top, Markup().join(body)
    )


def _joined(markup: Markup, texts: Iterable[str]) -> Markup:
    return Markup().join(markup.format(_clipped(one)) for one in texts)


def _lines(texts: Iterable[str], bold: bool = False) -> Markup:
    first, *rest = [_clipped(one) for one in texts] or [""]
    head = Markup("<b>{}</b>").format(first) if bold else Markup("{}").format(first)
    lines = [head, *(Markup("{}").format(line) for line in rest)]
    return Markup("<div>{}</div>").format(Markup("<br>").join(lines))


def _coloured(word: str, tone: str) -> Markup:
    return Markup('<div style="font-size:1.4em;font-weight:600;color:{}">{}</div>').format(
        _TONES[tone], _clipped(word)
    )


def _clipped(value: Any) -> str:
    cut = clean(str(value))
    return (
        cut
        if len(cut) <= _MOST_CHARACTERS
        else f"{cut[:_MOST_CHARACTERS]}... (whole in the record's field)"
    )


def _chart(profile: Profile) -> Markup:
    drawn = picture(profile, "step")
    if drawn is None:
        return Markup()
    shape = Markup('<path fill="{}" d="{}"><title>{}</title></path>')
    shapes = [
        shape.format(_COLOURS[layer.kind], path, layer.kind)
        for layer, path in layer_paths(drawn, drawn.peak_bytes or 1)
    ]
    width, height = _PICTURE
    return Markup(
        '<svg viewBox="0 0 1000 1000" preserveAspectRatio="none" width="{}" height="{}" role="img"'
        ' aria-label="{}">{}</svg>'
    ).format(width, height, drawn.summary, Markup().join(reversed(shapes)))
