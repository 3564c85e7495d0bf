"""Renders a report as one HTML file: offline, readable without scripts, in dark mode, on phones, in print."""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from torchtrim.core.isolation import isolated
from torchtrim.core.units import format_bytes, format_seconds
from torchtrim.records import Figures, Finding, Profile, Report
from torchtrim.records.files import without_collection
from torchtrim.report import facts, frontier, plan_words, sections, stages
from torchtrim.report.answers import answers, fixes_verdict
from torchtrim.report.breakdown import ModuleNode, TimeSplit, count, operator_table, splits, tree
from torchtrim.report.charts import trade_off
from torchtrim.report.folds import folded
from torchtrim.report.formats import json
from torchtrim.report.headline import headline
from torchtrim.report.lanes import CopyLanes, Lanes, copies_of, lanes
from torchtrim.report.located import excerpt
from torchtrim.report.memory_charts import NO_CHARTS, MemoryCharts, memory_charts
from torchtrim.report.page_title import page_title, unwritten
from torchtrim.report.peak_lines import peak_lines
from torchtrim.report.safe import at_most, clean, keep_right, without_source
from torchtrim.report.sections import figure_rows
from torchtrim.report.timeline import TimedStep, copies_view, timeline_view

_HERE = Path(__file__).parent
_PROFILE = "profile.json"
_MOST_BYTES = 450_000  # Arbitrary; a page that opens at once and can be sent by mail.
_MOST_CHARACTERS = 2000  # Arbitrary; no sentence of ours is as long, only names from outside.
_CODE = re.compile(r"`([^`]+)`")
_WIDEST_LINE = 600  # Arbitrary; longer lines of diffs are cut, as generated code has.
_FINDING_BYTES = 200  # The least bytes of a finding in JSON: spares encoding what cannot fit.

T = TypeVar("T")


@without_collection()
def render(
    report: Report,
    before: Profile | None,
    after: Profile | None,
    *,
    source: bool = True,
    profile: str = _PROFILE,
) -> str:
    """Return the page. `before` and `after` are the profiles to draw, if any.

    Without `source`, the page has no paths, script name, source lines or diffs. `profile`: the saved
    profile, as an argument of `torchtrim export`.
    """
    shown = report if source else without_source(report)
    template = environment().get_template("page.html.jinja")
    drawings = _drawings(shown, before, after)
    page = ""
    for caps in _CAPS:
        page = template.render(
            view=_view(shown, drawings, caps, source),
            report=shown,
            profile=profile if source else _PROFILE,
        )
        if len(page.encode()) <= _MOST_BYTES:
            break
    return page


def environment() -> Environment:
    """Return the environment of all pages: their templates, words and style."""
    environment = Environment(
        loader=FileSystemLoader(_HERE),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=_harmless,
    )
    environment.filters["typeset"] = _typeset
    environment.filters["marked"] = _marked
    script = (_HERE / "page.js").read_text(encoding="utf-8")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    environment.globals.update(
        script=Markup(script),
        policy=Markup(f"'sha256-{digest}'"),
        facts=facts,
        frontier=frontier,
        plan_words=plan_words,
        sections=sections,
        stages=stages,
        trade=trade_off,
        bytes=format_bytes,
        seconds=format_seconds,
        css=Markup((_HERE / "page.css").read_text(encoding="utf-8")),
    )
    return environment


def _harmless(value: Any) -> Any:
    if isinstance(value, Markup) or not isinstance(value, str):
        return value
    return clean(at_most(value, _MOST_CHARACTERS))


def _marked(text: str) -> Markup:
    """Mark up the parts of text between backticks as code."""
    parts = enumerate(_CODE.split(_harmless(text)))
    return Markup().join(
        Markup("<code>{}</code>").format(part) if at % 2 else Markup("{}").format(part)
        for at, part in parts
    )


def _typeset(text: str) -> str:
    """Use typographic arrows and signs, and keep a figure and its percent sign on one line."""
    signs = text.replace("->", "\N{RIGHTWARDS ARROW}").replace("+-", "\N{PLUS-MINUS SIGN}")
    return signs.replace(" %", "\N{NO-BREAK SPACE}%")


@dataclass(frozen=True, kw_only=True)
class _PageLimits:
    findings: int
    rows: int
    diff_lines: int
    json_bytes: int
    spans: int
    operators: int


# Tried in order until the page is small enough; the numbers are arbitrary.
_CAPS = (
    _PageLimits(findings=40, rows=30, diff_lines=60, json_bytes=60_000, spans=4000, operators=200),
    _PageLimits(findings=20, rows=16, diff_lines=20, json_bytes=60_000, spans=2000, operators=100),
    _PageLimits(findings=8, rows=8, diff_lines=8, json_bytes=0, spans=500, operators=40),
    _PageLimits(findings=3, rows=3, diff_lines=3, json_bytes=0, spans=0, operators=10),
)


@dataclass(frozen=True)
class CappedList(Generic[T]):
    """The first items of a list, and the number of omitted ones."""

    shown: Sequence[T]
    dropped: int


@dataclass(frozen=True, kw_only=True)
class _Drawings:
    """Drawings that are slow for a large profile and do not depend on the limits of the page."""

    splits: Sequence[TimeSplit]
    profile: Profile | None = None
    lanes: Lanes | None = None
    steps: Sequence[TimedStep] = ()
    copies: CopyLanes | None = None
    memory: MemoryCharts = NO_CHARTS
    tree: Sequence[ModuleNode] = ()


_TemplateItem = dict[str, object]
"""The fields of something that the page's template shows."""


def _drawings(report: Report, before: Profile | None, after: Profile | None) -> _Drawings:
    if before is None or not before.operators:
        return _Drawings(splits=splits(report, before))
    drawn = lanes(report.waiting, before)
    steps = [("Original", before, folded(before, drawn, _timed(report.original)))]
    if after is not None and after.operators:
        planned = folded(after, lanes(report.waiting, after), _timed(report.planned))
        steps.append(("Planned" if report.plan else "With the fixes", after, planned))
    return _Drawings(
        profile=before,
        lanes=drawn,
        steps=[TimedStep(title, profile, one.lanes) for title, profile, one in steps],
        copies=copies_of(before, report.plan.techniques) if report.plan else None,
        memory=memory_charts(report, steps),
        splits=splits(report, before),
        tree=tree(before),
    )


def _timed(figures: Figures | None) -> float:
    return figures.step_seconds if figures is not None else 0.0


def _view(report: Report, drawings: _Drawings, caps: _PageLimits, source: bool) -> _TemplateItem:
    """Return everything the page's template needs beyond the report itself, within `caps`."""
    heads, rows = figure_rows(report)
    profile = drawings.profile
    project = [Path(profile.project)] if profile and profile.project else []
    folders = [*project, Path(report.script).parent]
    findings = _cap(report.findings, caps.findings)
    kinds = [row for row in rows if row.kind][: caps.rows]
    return {
        "script": report.script.replace("\\", "/").rpartition("/")[2],
        "headline": headline(report),
        "title": page_title(report),
        "answers": answers(report),
        "idle": facts.is_idle(report),
        "fixes_verdict": fixes_verdict(report),
        "unwritten": unwritten(report),
        "heads": heads,
        "figures": [row for row in rows if not row.kind],
        "kinds": kinds,
        "longest": max((max(row.bar) for row in kinds), default=0) or 1,
        "memory": drawings.memory,
        "findings": CappedList(
            [_finding(report, f, folders, caps) for f in findings.shown], findings.dropped
        ),
        "diff": _diff(report.fixes.diff if report.fixes else "", caps),
        "lines": CappedList(
            peak_lines(report, caps.rows, folders), max(len(report.holders) - caps.rows, 0)
        ),
        "techniques": _cap(report.plan.techniques if report.plan else (), caps.rows),
        "frontier": _cap(report.frontier, caps.rows),
        "notes": _cap(report.notes, caps.rows),
        "bounded": _cap(report.stream.bounded if report.stream else (), caps.rows),
        "modules": _modules(report, caps.rows),
        "download": _download(report, caps.json_bytes),
        "splits": drawings.splits,
        "tree": drawings.tree if count(drawings.tree) <= caps.spans else (),
        **_step(drawings, caps, source),
    }


def _step(drawings: _Drawings, caps: _PageLimits, source: bool) -> _TemplateItem:
    profile, lanes, copies = drawings.profile, drawings.lanes, drawings.copies
    if profile is None or lanes is None:
        names = ("timeline", "copies", "operators", "scripted")
        return {**dict.fromkeys(names), "phases": frozenset()}
    phases: set[str] = {op.phase for step in drawings.steps for op in step.profile.operators}
    waits = any(step.lanes.waits for step in drawings.steps)
    return {
        "timeline": timeline_view(drawings.steps, caps.spans, source=source),
        "copies": None if copies is None else copies_view(profile, copies),
        "operators": operator_table(profile, lanes, caps.operators, source=source),
        "phases": phases - {"loader"} | ({"waiting"} if waits else set()),
        "scripted": True,
    }


def _cap(every: Sequence[T], most: int) -> CappedList[T]:
    return CappedList(every[:most], max(len(every) - most, 0))


def _place(report: Report, path: str, line: int) -> str:
    return keep_right(clean(facts.place(path, line, facts.home(report))), 80)


def _finding(
    report: Report, finding: Finding, folders: list[Path], caps: _PageLimits
) -> _TemplateItem:
    diff = finding.fix.diff if finding.fix and finding.fix.diff else ""
    return {
        "finding": finding,
        "place": _place(report, finding.path, finding.line),
        "answered": report.plan is not None and _is_of_plans(finding),
        "source": excerpt(finding.path, finding.line, finding.end_line, folders),
        "diff": _diff(diff, caps),
    }


def _is_of_plans(finding: Finding) -> bool:
    """Return True for advice to plan, which a report with a plan has followed."""
    fix = finding.fix
    return fix is not None and fix.kind == "advice" and "torchtrim optimize" in fix.reason


def _diff(diff: str, caps: _PageLimits) -> CappedList[str]:
    lines = [line.expandtabs(4)[:_WIDEST_LINE] for line in diff.splitlines()]
    return _cap(lines, caps.diff_lines)


def _modules(report: Report, most: int) -> CappedList[_TemplateItem]:
    modules = report.estimated.modules if report.estimated else ()
    ordered = _cap(sorted(modules, key=lambda one: (-one.bytes, one.path)), most)
    largest = max((one.bytes for one in modules), default=0) or 1
    shown = [
        {
            "name": keep_right(clean(one.path), 60) or "outside modules",
            "bytes": one.bytes,
            "share": 100 * one.bytes / largest,
        }
        for one in ordered.shown
    ]
    return CappedList(shown, ordered.dropped)


def _download(report: Report, most: int) -> Markup:
    encoded = b""
    if _FINDING_BYTES * len(report.findings) <= most:
        with isolated("renderer", "report.json"):
            encoded = json.render(report)
    if not 0 < len(encoded) <= most:
        return Markup()
    return Markup("data:application/json;base64," + base64.b64encode(encoded).decode())
