"""Reports on trace files, and saved profiles as traces."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from msgspec.structs import replace

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

    `source`: folder of the source files of calls. An unreadable file raises an error if it is named, and
    becomes a note if it is in a folder with readable ones.
    """
    files = find_traces(list(paths))
    named = set(paths)
    reports: list[TraceReport] = []
    talks: list[Talk] = []
    failed: list[TorchtrimError] = []
    for file in files:
        progress(f"reading: {file.name}")
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
    return replace(report, notes=(*report.notes, *left_out))


def perfetto_trace(path: Path, *, source: bool = True) -> bytes:
    """Return a saved profile as a trace for ui.perfetto.dev: operators, modules, waits, memory, findings.

    With a plan in its folder, also show the planned copies to and from the host.
    """
    loaded = load_profile(path)
    findings, waiting = priced(loaded, diagnose(loaded))
    if not source:
        findings = tuple(
            replace(f, message=scrubbed(f.message, (loaded.script, f.path))) for f in findings
        )
    techniques: tuple[Technique, ...] = ()
    plan = path.with_name(f"{path.name.rpartition('profile.json')[0]}plan.toml")
    with suppress(TorchtrimError, OSError):
        techniques = load_plan(plan).techniques if plan.exists() else ()
    return perfetto.render(loaded, findings, waiting, techniques=techniques, source=source)
