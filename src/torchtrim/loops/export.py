"""Reads a profile that was saved, and gives it in a form that other tools read."""

from __future__ import annotations

from pathlib import Path

import msgspec

from torchtrim.records.files import load_profile
from torchtrim.report import perfetto
from torchtrim.report.safe import scrubbed
from torchtrim.rules.prices import priced
from torchtrim.rules.registry import diagnose


def perfetto_trace(path: Path, *, source: bool = True) -> bytes:
    """A saved profile as a trace for ui.perfetto.dev: operators, modules, waits, memory, findings."""
    loaded = load_profile(path)
    findings, waiting = priced(loaded, diagnose(loaded))
    if not source:
        findings = tuple(
            msgspec.structs.replace(f, message=scrubbed(f.message, (loaded.script, f.path)))
            for f in findings
        )
    return perfetto.render(loaded, findings, waiting, source=source)
