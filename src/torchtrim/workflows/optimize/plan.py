"""Runs the original and plans for a budget; the plan is tried only where it is exported."""

from __future__ import annotations

import msgspec

from torchtrim import __version__
from torchtrim.core.units import format_bytes
from torchtrim.errors import ExportFailed
from torchtrim.executor.export import exported
from torchtrim.records.budget import MemoryKind, memory_limit
from torchtrim.records.report import FrontierPoint, Result
from torchtrim.records.terms import BITWISE, Terms
from torchtrim.records.trial import Request
from torchtrim.report.assemble import with_plan
from torchtrim.runner.trials import Progress, Workload
from torchtrim.workflows.findings import report_of
from torchtrim.workflows.optimize.fitting import Fit, Fitting
from torchtrim.workflows.optimize.report import fitted
from torchtrim.workflows.optimize.tried import measured


def plan_report(
    workload: Workload,
    memory: str | int,
    request: Request,
    *,
    memory_kind: MemoryKind = "allocated",
    terms: Terms = BITWISE,
    frontier: bool = False,
    progress: Progress = lambda _: None,
) -> Result:
    """A plan with its figures and, if asked, what other budgets would cost. Raises `InfeasibleBudget`."""
    limit = memory_limit(memory, memory_kind)
    fitting = Fitting(workload, request, progress, terms)
    trial = fitting.observe_longest()
    planner = fitting.planner(trial)
    whole = measured(trial, memory_kind)
    bias = whole - planner.simulated_original
    chosen = planner.plan(limit.budget(whole).biased(bias))
    points: tuple[FrontierPoint, ...] = planner.frontier(bias=bias) if frontier else ()
    report = with_plan(report_of("plan", workload, trial), chosen, chosen.budget)
    pinned = [note] if (note := planner.pinned.note()) else []
    notes = (*report.notes, *fitting.notes, *pinned)
    report = msgspec.structs.replace(report, frontier=points, notes=notes)
    return Result(report, trial.profile, None, chosen)


def export_report(
    workload: Workload,
    memory: str | int,
    request: Request,
    *,
    memory_kind: MemoryKind = "allocated",
    terms: Terms = BITWISE,
    progress: Progress = lambda _: None,
) -> Result:
    """A plan as plain PyTorch, run and verified as that. Raises `InfeasibleBudget` and `ExportFailed`."""
    fitting = Fitting(workload, request, progress, terms._replace(exports=True))
    found = fitting.fit(memory_limit(memory, memory_kind))
    if found.certificate is not None and found.certificate.verdict == "NOT EQUAL":
        raise ExportFailed(
            f"the exported plan does not compute the same: {found.certificate.reason}. Nothing was written."
        )
    result = fitted(workload, found, "plan")
    return result._replace(exported=exported(found.plan, _said(found)))


def _said(found: Fit) -> str:
    """What an exported plan says of itself."""
    script = found.plan.script.replace("\\", "/").replace('"', "'")
    lines = [
        f"The plan of torchtrim {__version__} for {script}, in plain PyTorch: it needs torch alone.",
        "",
        "    applied = planned.apply(model)  # before the first step, once the model is on its device",
        "    applied.revert()  # the model as it was; a state_dict is the same either way",
    ]
    if found.planned is not None and found.certificate is not None:
        verdict, steps = found.certificate.verdict, found.certificate.steps
        before, after = map(format_bytes, (found.original.peak_bytes, found.planned.peak_bytes))
        lines += [
            "",
            f"Measured with this file: peak {before} -> {after}, {verdict} over {steps} steps.",
        ]
    return "\n".join(lines) + "\n"
