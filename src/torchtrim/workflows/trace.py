"""Files -> report: reads every trace that is named and analyses it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from torchtrim.errors import TorchtrimError
from torchtrim.records.trace import TraceReport
from torchtrim.traces.analysis import analyse, joined
from torchtrim.traces.folder import find_traces
from torchtrim.traces.ranks import Talk, talk_of
from torchtrim.traces.reader import read_trace


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
