"""What fitting a workload gives: a report, an exported plan, or a live model with its plan applied."""

from __future__ import annotations

import msgspec

from torchtrim import __version__
from torchtrim.core.isolation import isolated
from torchtrim.core.units import format_bytes
from torchtrim.errors import ApplyFailed, ExportFailed
from torchtrim.executor.apply import Applied, apply_plan, named_roots
from torchtrim.executor.export import exported
from torchtrim.records.budget import MemoryKind, MemoryLimit, memory_limit
from torchtrim.records.report import FrontierPoint, Result
from torchtrim.records.terms import BITWISE, Terms
from torchtrim.records.trial import Request
from torchtrim.report.assemble import with_missed_budget, with_plan, with_planned, with_ranks
from torchtrim.runner.script import Script
from torchtrim.runner.trials import Progress, Workload
from torchtrim.workflows.findings import ranks_of, report_of
from torchtrim.workflows.fix import Fixing, fixes_of, with_fixes
from torchtrim.workflows.optimize.fitting import Fit, Fitting
from torchtrim.workflows.optimize.trials import measured


def optimize_report(
    workload: Workload,
    memory: str | int,
    request: Request,
    *,
    memory_kind: MemoryKind = "allocated",
    terms: Terms = BITWISE,
    fixes: bool = False,
    progress: Progress = lambda _: None,
) -> Result:
    """The whole loop. Where nothing fits, it gives the plan with the smallest peak, and what would help.

    With `fixes`, a script's host-device syncs are fixed too, as a diff beside the plan.
    """
    limit = memory_limit(memory, memory_kind)
    fitting = Fitting(workload, request, progress, terms)
    fixing = Fixing(workload, request, progress) if fixes and isinstance(workload, Script) else None
    found = fitting.nearest(limit)
    result = fitted(workload, found)
    if fixing is not None and found.missed is None and isinstance(workload, Script):
        with isolated("fix", "of host-device syncs"):
            fixed = fixing.fix(found.original)
            cured = with_fixes(result.report, fixes_of(fixed, workload.project))
            result = result._replace(report=cured)
    return result


def fitted(workload: Workload, found: Fit, verb: str = "optimize") -> Result:
    """What fitting gave, as a report."""
    report = with_planned(
        report_of(verb, workload, found.original), found.planned, found.certificate
    )
    report = with_plan(report, found.plan, found.budget)
    report = with_ranks(report, found.original, found.planned)
    report = msgspec.structs.replace(report, notes=(*found.original.notes, *found.notes))
    after = found.planned.profile if found.planned else None
    if found.missed is not None:
        report = with_missed_budget(report, found.missed, found.budget, after)
    ranks = ranks_of(found.original)
    return Result(report, found.original.profile, after, found.plan, ranks=ranks)


def fit_model(fitting: Fitting, limit: MemoryLimit) -> tuple[Fit, Applied]:
    """Fit a live model, and leave the plan applied.

    Raises `InfeasibleBudget`, and `ApplyFailed` if the planned step does not equal the original.
    """
    workload = fitting.workload
    assert not isinstance(workload, Script)
    found = fitting.fit(limit)
    if found.certificate is not None and found.certificate.verdict == "NOT EQUAL":
        raise ApplyFailed(
            f"the planned step does not equal the original: {found.certificate.reason}. "
            "The model is as it was."
        )
    return found, apply_plan(found.plan, named_roots((workload.model, *workload.optimizers)))


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
