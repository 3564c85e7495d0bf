"""Compares two reports or profiles, and judges each change by its spread."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import PurePath
from typing import Literal, NamedTuple

from torchtrim import __version__
from torchtrim.analysis.prices import priced
from torchtrim.analysis.timeline import by_kind, peak_operator
from torchtrim.records import Figures, Finding, Profile, Report
from torchtrim.records.comparison import (
    Change,
    Comparison,
    FindingChange,
    Judgement,
    Side,
    Unit,
)
from torchtrim.report.facts import step_name
from torchtrim.rules.registry import diagnose

_RSS_VARIES = 0.05  # Arbitrary; the process peak of equal runs differs by a few percent.


_Figures = dict[str, tuple[Unit, float, float | None]]


class _SideFacts(NamedTuple):
    """The facts of one side. A figure has a unit, a value, and its spread, None if it varies unmeasured."""

    side: Side
    figures: _Figures
    kinds: dict[str, int]
    findings: Sequence[Finding]


def compare(
    before: Report | Profile, after: Report | Profile, before_path: str, after_path: str
) -> Comparison:
    """Compare two reports or profiles, which were read from the given paths."""
    one, other = _facts(before, before_path), _facts(after, after_path)
    names = list(dict.fromkeys((*one.figures, *other.figures)))
    kinds = sorted({*one.kinds, *other.kinds}, key=lambda k: -max(_kind_bytes(one, other, k)))
    return Comparison(
        torchtrim=__version__,
        before=one.side,
        after=other.side,
        changes=tuple(_change(name, one, other) for name in names),
        by_kind=tuple(
            _changed(kind.replace("_", " "), "bytes", *_kind_bytes(one, other, kind), 0.0)
            for kind in kinds
            if any(_kind_bytes(one, other, kind))
        ),
        findings=tuple(_findings(one, other)),
        notes=tuple(_notes(one, other)),
    )


def _kind_bytes(one: _SideFacts, other: _SideFacts, kind: str) -> tuple[int, int]:
    return one.kinds.get(kind, 0), other.kinds.get(kind, 0)


def _facts(found: Report | Profile, path: str) -> _SideFacts:
    if isinstance(found, Report):
        return _report_facts(found, path)
    findings, waiting = priced(found, diagnose(found))
    figures: _Figures = {
        "peak": ("bytes", found.peak_bytes, 0.0),
        "tracked peak": ("bytes", found.tracked_peak_bytes, 0.0),
        "step with the recorder": ("seconds", found.step_seconds, None),
        "operators": ("count", len(found.operators), 0.0),
        "waits": ("count", len(found.syncs), 0.0),
    }
    if waiting is not None:
        figures[f"modelled step, {waiting.device}"] = ("seconds", waiting.step_ms / 1e3, 0.0)
    at = peak_operator(found)
    return _SideFacts(
        side=_side(found, path, "profile", 1),
        figures=figures,
        kinds=by_kind(found, at) if at >= 0 else {},
        findings=findings,
    )


def _report_facts(report: Report, path: str) -> _SideFacts:
    figures: _Figures = {}
    for prefix, found in (("", report.original), ("planned ", report.planned)):
        if found is not None:
            figures |= _measured(prefix, found, report)
    if report.waiting is not None:
        name = f"modelled step, {report.waiting.device}"
        figures[name] = ("seconds", report.waiting.step_ms / 1e3, 0.0)
    return _SideFacts(
        side=_side(report, path, "report", report.steps),
        figures=figures,
        kinds=report.original.by_kind if report.original else {},
        findings=report.findings,
    )


def _measured(prefix: str, figures: Figures, report: Report) -> _Figures:
    found: _Figures = {
        f"{prefix}peak": ("bytes", figures.peak_bytes, 0.0),
        f"{prefix}tracked peak": ("bytes", figures.tracked_peak_bytes, 0.0),
    }
    if figures.reserved_bytes is not None:
        found[f"{prefix}reserved peak"] = ("bytes", figures.reserved_bytes, 0.0)
    if figures.rss_bytes is not None:
        noise = _RSS_VARIES * figures.rss_bytes
        found[f"{prefix}process peak"] = ("bytes", figures.rss_bytes, noise)
    if figures.step_seconds:
        spread = figures.spread_seconds if report.steps > 1 else None
        found[f"{prefix}{step_name(report)}"] = ("seconds", figures.step_seconds, spread)
    return found


def _side(
    found: Report | Profile, path: str, kind: Literal["report", "profile"], steps: int
) -> Side:
    return Side(
        path=path,
        kind=kind,
        script=found.script,
        project=found.project,
        device=found.device,
        torch=found.torch,
        torchtrim=found.torchtrim,
        steps=steps,
    )


def _change(name: str, one: _SideFacts, other: _SideFacts) -> Change:
    was, now = one.figures.get(name), other.figures.get(name)
    before, after = was[1] if was else None, now[1] if now else None
    spread = None
    if was is not None and now is not None and was[2] is not None and now[2] is not None:
        spread = (was[2] + now[2]) / 2
    return _changed(name, (was or now or ("count",))[0], before, after, spread)


def _changed(
    name: str, unit: Unit, before: float | None, after: float | None, spread: float | None
) -> Change:
    judged: Judgement = "unknown"
    if before is not None and after is not None and spread is not None:
        by = after - before
        judged = "less" if by < 0 else "more"
        judged = "no significant change" if abs(by) <= spread else judged
    return Change(name=name, unit=unit, before=before, after=after, spread=spread, judged=judged)


def _findings(one: _SideFacts, other: _SideFacts) -> Iterator[FindingChange]:
    """Match findings by code and file: first those on the same line, then the rest in line order."""
    gone: list[Finding] = []
    new: list[Finding] = []
    before, after = _grouped(one), _grouped(other)
    for key in dict.fromkeys((*after, *before)):
        kept, lost, found = _matched(before.get(key, []), after.get(key, []))
        gone, new = gone + lost, new + found
        for was, now in kept:
            yield FindingChange(change="kept", finding=now, before=was)
    yield from (FindingChange(change="new", finding=finding) for finding in new)
    yield from (FindingChange(change="gone", finding=finding, before=finding) for finding in gone)


def _grouped(side: _SideFacts) -> dict[tuple[str, str], list[Finding]]:
    groups: dict[tuple[str, str], list[Finding]] = defaultdict(list)
    for finding in side.findings:
        groups[finding.code, _project_path(side.side, finding.path)].append(finding)
    return groups


def _project_path(side: Side, path: str) -> str:
    """Return the path in the project, empty for the script, whose name may differ between the sides."""
    path, script = path.replace("\\", "/"), side.script.replace("\\", "/")
    if path == script or path == f"{side.project}/{script}":
        return ""
    return path.removeprefix(f"{side.project}/") if side.project else PurePath(path).name


def _matched(
    before: Sequence[Finding], after: Sequence[Finding]
) -> tuple[list[tuple[Finding, Finding]], list[Finding], list[Finding]]:
    kept: list[tuple[Finding, Finding]] = []
    gone, left = sorted(before, key=lambda f: f.line), []
    for finding in sorted(after, key=lambda f: f.line):
        same = next((f for f in gone if f.line == finding.line), None)
        if same is None:
            left.append(finding)
        else:
            gone.remove(same)
            kept.append((same, finding))
    moved = min(len(gone), len(left))
    kept += zip(gone[:moved], left[:moved], strict=True)
    return kept, gone[moved:], left[moved:]


def _notes(one: _SideFacts, other: _SideFacts) -> Iterator[str]:
    for name in ("device", "torch", "kind"):
        was, now = getattr(one.side, name), getattr(other.side, name)
        if was != now:
            yield f"the {name} differs, {was} and {now}: figures may differ for that reason alone"
    if PurePath(one.side.script).name != PurePath(other.side.script).name:
        yield f"the scripts differ, {one.side.script} and {other.side.script}"
    if any(f[0] == "seconds" and f[2] is None for s in (one, other) for f in s.figures.values()):
        yield "a time was measured only once, so its spread is unknown: pass --steps 5 or more"
