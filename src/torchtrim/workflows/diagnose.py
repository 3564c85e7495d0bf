"""Findings of waste in a step of the original."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec.structs import replace

from torchtrim.analysis.prices import priced
from torchtrim.core.isolation import failures
from torchtrim.errors import NothingTrains
from torchtrim.records.finding import Finding
from torchtrim.records.profile import Profile
from torchtrim.records.report import Result
from torchtrim.records.trial import Request, Trial
from torchtrim.rules.registry import diagnose
from torchtrim.rules.tt402_blocks_capture import RULE, verdict
from torchtrim.runner.script import Script
from torchtrim.runner.trials import Progress, Workload
from torchtrim.workflows.compiled import compiles, with_compiled
from torchtrim.workflows.findings import ranks_of, report_of, with_settings
from torchtrim.workflows.optimize.fitting import Fitting

CAPTURE = RULE.code
TAKEN_AS_CALLS = "the script runs no backward, so a step is a call of its model"


def record(workload: Workload, warmup: int, progress: Progress) -> Profile:
    """Record one step. Raises `ScriptFailed` if there was none."""
    fitting = Fitting(workload, Request(steps=0, warmup=warmup), progress)
    return fitting.planner(fitting.observe()).profile


def findings_of(
    workload: Workload, select: Sequence[str] | None, progress: Progress
) -> tuple[Finding, ...]:
    """Return the findings on a step, most expensive first."""
    if isinstance(workload, Script) and workload.processes > 1:
        trial = Fitting(workload, Request(steps=1), progress).observe()
        findings = report_of("diagnose", workload, trial).findings
        starts = tuple(select) if select is not None else ("",)
        return tuple(one for one in findings if one.code.startswith(starts))
    profile = record(workload, 1, progress)
    return with_settings(priced(profile, diagnose(profile, select))[0], profile.project)


def diagnose_report(
    workload: Workload,
    request: Request,
    *,
    capture: bool = False,
    progress: Progress = lambda _: None,
) -> Result:
    """Report the findings on a step, with its figures.

    `capture`: also report the obstacles to its capture in a CUDA graph (TT402), or that it has none.
    """
    trial = _observed(workload, replace(request, grows=True), progress)
    result = Result(report_of("diagnose", workload, trial), trial.profile, ranks=ranks_of(trial))
    if isinstance(workload, Script) and workload.processes == 1 and compiles(trial):
        result = with_compiled(result, workload, request, progress)
    if capture and trial.profile is not None:
        obstacles = diagnose(trial.profile, (CAPTURE,))
        said = verdict(trial.profile, len({(one.path, one.line) for one in obstacles}))
        if any(one.name == CAPTURE for one in failures("rule")):
            said = f"obstacles to the step's capture are not known: {CAPTURE} failed"
        report = result.report
        findings, notes = (*report.findings, *obstacles), (said, *report.notes)
        result = result._replace(report=replace(report, findings=findings, notes=notes))
    return result


def _observed(workload: Workload, request: Request, progress: Progress) -> Trial:
    try:
        return Fitting(workload, request, progress).observe()
    except NothingTrains:
        trial = Fitting(workload, replace(request, infers=True), progress).observe()
        trial.notes += (TAKEN_AS_CALLS,)
        return trial
