"""Reads a profile that was saved, and gives it in a form that other tools read."""

from __future__ import annotations

from pathlib import Path

import msgspec

from torchtrim.analysis.prices import priced
from torchtrim.errors import TorchtrimError
from torchtrim.records.files import load_plan, load_profile
from torchtrim.records.plan import Technique
from torchtrim.report import perfetto
from torchtrim.report.safe import scrubbed
from torchtrim.rules.registry import diagnose


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
