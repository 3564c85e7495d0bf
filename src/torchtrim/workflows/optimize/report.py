"""The results of fitting a workload: a report, an exported plan, or a live model with its plan applied."""

from __future__ import annotations

from msgspec.structs import replace

from torchtrim import __version__
from torchtrim.core.isolation import isolated
from torchtrim.core.units import format_bytes, parse_amount
from torchtrim.core.words import first_line
from torchtrim.errors import ExportFailed, TorchtrimError
from torchtrim.executor.apply import apply_plan, named_roots
from torchtrim.executor.export import exported
from torchtrim.executor.registry import Handles
from torchtrim.records.budget import MemoryKind, MemoryLimit, memory_limit
from torchtrim.records.report import FrontierPoint, Report, Result
from torchtrim.records.terms import BITWISE, Terms
from torchtrim.records.trial import Request
from torchtrim.report.assemble import with_missed_budget, with_plan, with_planned, with_ranks
from torchtrim.runner.script import Script
from torchtrim.runner.trials import Progress, Workload
from torchtrim.workflows.compiled import GraphsMiss, compiles, optimize_compiled
from torchtrim.workflows.findings import ranks_of, report_of
from torchtrim.workflows.fix import Fixing, fixes_of, with_fixes
from torchtrim.workflows.fix_attempt import unworthy
from torchtrim.workflows.optimize.fitting import Fit, Fitting
from torchtrim.workflows.optimize.trials import check_equal, measured


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
    """Fit a workload; if no plan fits, report the plan with the smallest peak, and the levers.

    With `fixes`, also fix a script's host-device syncs, as a diff beside the plan, if they cost more than the
    spread of a step.
    """
    limit = memory_limit(memory, memory_kind)
    fitting = Fitting(workload, request, progress, terms)
    kept = _compiled(fitting, limit, request, terms, progress)
    if isinstance(kept, Result):
        return kept
    limit, notes = kept
    fit = fitting.nearest(limit)
    progress("report")
    result = fitted(workload, fit)
    result = result._replace(report=replace(result.report, notes=(*notes, *result.report.notes)))
    if fixes and isinstance(workload, Script) and fit.missed is None:
        with isolated("fix", "of host-device syncs"), fitting.interruptible():
            result = result._replace(
                report=_with_worthy_fixes(workload, fit, request, result, progress)
            )
    return result


def _compiled(
    fitting: Fitting, limit: MemoryLimit, request: Request, terms: Terms, progress: Progress
) -> Result | tuple[MemoryLimit, tuple[str, ...]]:
    """Plan the graphs of a script that compiles, or return the limit of an eager plan, and why it is one.

    A share is relative to the compiled peak, if that is known.
    """
    script = fitting.workload
    if not isinstance(script, Script) or script.processes > 1 or limit.kind != "allocated":
        return limit, ()
    with fitting.interruptible():
        if script.device not in (None, "cpu") or not compiles(fitting.observe()):
            return limit, ()
        if terms.pins or terms.exports:
            return limit, ("pins and exports are of eager plans, so the script is planned eagerly",)
        try:
            return optimize_compiled(script, limit, request, progress)
        except TorchtrimError as error:
            said = f"planned eagerly, since its compiled graphs were not: {first_line(error)}"
            if isinstance(error, GraphsMiss):
                limit = limit._replace(amount=parse_amount(error.budget_bytes))
            return limit, (said,)


def _with_worthy_fixes(
    script: Script, fit: Fit, request: Request, result: Result, progress: Progress
) -> Report:
    """Fix the syncs if that can gain more than the spread of a step; else say what they cost."""
    if reason := unworthy(fit.original, script.project):
        return replace(result.report, notes=(reason, *result.report.notes))
    fixed = Fixing(script, request, progress).fix(fit.original)
    return with_fixes(result.report, fixes_of(fixed, script.project))


def fitted(workload: Workload, fit: Fit, verb: str = "optimize") -> Result:
    """Return the report of a fit."""
    report = with_planned(report_of(verb, workload, fit.original), fit.planned, fit.certificate)
    report = with_plan(report, fit.plan, fit.budget, fit.original.profile)
    report = with_ranks(report, fit.original, fit.planned)
    report = replace(report, notes=(*fit.original.notes, *fit.notes))
    after = fit.planned.profile if fit.planned else None
    if fit.missed is not None:
        report = with_missed_budget(report, fit.missed, fit.budget, after)
    return Result(report, fit.original.profile, after, fit.plan, ranks=ranks_of(fit.original))


def fit_model(fitting: Fitting, limit: MemoryLimit) -> tuple[Fit, Handles]:
    """Fit a live model, and leave the plan applied.

    Raises `InfeasibleBudget`, and `ApplyFailed` if the planned step does not equal the original.
    """
    workload = fitting.workload
    assert not isinstance(workload, Script)
    fit = fitting.fit(limit)
    check_equal(fit.certificate, "step")
    return fit, apply_plan(fit.plan, named_roots((workload.model, *workload.optimizers)))


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
    """Return a plan with its figures and, if requested, the frontier. Raises `InfeasibleBudget`."""
    limit = memory_limit(memory, memory_kind)
    fitting = Fitting(workload, request, progress, terms)
    with fitting.interruptible():
        trial = fitting.observe_longest()
        planner = fitting.planner(trial)
        whole = measured(trial, memory_kind)
        bias = whole - planner.simulated_original
        budget = limit.budget(whole)
        progress(f"planning: for {format_bytes(budget.bytes)}")
        chosen = planner.plan(budget.biased(bias))
        points: tuple[FrontierPoint, ...] = planner.frontier(bias=bias) if frontier else ()
    report = with_plan(report_of("plan", workload, trial), chosen, chosen.budget, trial.profile)
    pinned = [note] if (note := planner.pinned.note()) else []
    notes = (*report.notes, *fitting.notes, *pinned)
    report = replace(report, frontier=points, notes=notes)
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
    """Export a plan as plain PyTorch, verified in that form. Raises `InfeasibleBudget`, `ExportFailed`."""
    fitting = Fitting(workload, request, progress, terms._replace(exports=True))
    fit = fitting.fit(memory_limit(memory, memory_kind))
    if fit.certificate is not None and fit.certificate.verdict == "NOT EQUAL":
        raise ExportFailed(
            f"the exported plan does not compute the same: {fit.certificate.reason}. Nothing was written."
        )
    result = fitted(workload, fit, "plan")
    return result._replace(exported=exported(fit.plan, _docstring(fit)))


def _docstring(fit: Fit) -> str:
    script = fit.plan.script.replace("\\", "/").replace('"', "'")
    lines = [
        f"The plan of torchtrim {__version__} for {script}, in plain PyTorch: it needs only torch.",
        "",
        "    applied = planned.apply(model)  # before the first step, once the model is on its device",
        "    applied.revert()  # restores the model; a state_dict is the same either way",
    ]
    if fit.planned is not None and fit.certificate is not None:
        verdict, steps = fit.certificate.verdict, fit.certificate.steps
        before, after = map(format_bytes, (fit.original.peak_bytes, fit.planned.peak_bytes))
        lines += [
            "",
            f"Measured with this file: peak {before} -> {after}, {verdict} over {steps} steps.",
        ]
    return "\n".join(lines) + "\n"
