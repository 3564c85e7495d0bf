"""Files -> report: reads every trace that is named and analyses it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from torchtrim.analysis.prices import priced
from torchtrim.errors import TorchtrimError
from torchtrim.records.files import load_plan, load_profile
from torchtrim.records.plan import Technique
from torchtrim.records.trace import TraceReport
from torchtrim.report import perfetto
from torchtrim.report.safe import scrubbed
from torchtrim.rules.registry import diagnose
from torchtrim.traces.analysis import analyse, joined
from torchtrim.traces.ranks import Talk, talk_of
from torchtrim.traces.reader import find_traces, read_trace


def diagnose_traces(
    paths: Sequence[Path],
    *,
    source: Path | None = None,
    progress: Callable[[str], None] = lambda _: None,
) -> TraceReport:
    """Find and price the waits of the traces: one file, the files of several ranks, or a folder.

    `source` is a folder of source files in which the lines of calls are looked up. What cannot be read
    raises, unless it was only found in a folder beside others that can; then a note says it.
    """
    files = find_traces(list(paths))
    named = set(paths)
    reports: list[TraceReport] = []
    talks: list[Talk] = []
    failed: list[TorchtrimError] = []
    for file in files:
        progress(f"reading {file.name}")
        try:
            trace = read_trace(file)
            reports.append(analyse(trace, source))
            talks.append(talk_of(trace))
        except TorchtrimError as error:
            if file in named:
                raise
            failed.append(error)
    if not reports:
        raise failed[0]
    report = joined(reports, talks)
    left_out = tuple(f"Left out: {error}" for error in failed)
    return msgspec.structs.replace(report, notes=(*report.notes, *left_out))


def perfetto_trace(path: Path, *, source: bool = True) -> bytes:
    """A saved profile as a trace for ui.perfetto.dev: operators, modules, waits, memory, findings.

    Where a plan is beside it, also the copies to and from the host that it plans.
    """
    loaded = load_profile(path)
    findings, waiting = priced(loaded, diagnose(loaded))
    if not source:
        findings = tuple(
            msgspec.structs.replace(f, message=scrubbed(f.message, (loaded.script, f.path)))
            for f in findings
        )
    techniques = _planned(path.with_name("plan.toml"))
    return perfetto.render(loaded, findings, waiting, techniques=techniques, source=source)


def _planned(path: Path) -> tuple[Technique, ...]:
    """The techniques of a plan, where there is one that can be read."""
    try:
        return load_plan(path).techniques if path.exists() else ()
    except (TorchtrimError, OSError):
        return ()
