"""Plans of the calls of a script that only runs its models, measured and verified."""

from __future__ import annotations

from msgspec.structs import replace

from torchtrim.core.units import format_apart
from torchtrim.errors import InfeasibleBudget, PlannedStepFailed, UsageError
from torchtrim.executor.apply import digest_of
from torchtrim.planner.plans import CallOptions, plan_of_calls
from torchtrim.records.budget import Budget, MemoryKind, MemoryLimit, memory_limit
from torchtrim.records.certificate import with_proof
from torchtrim.records.plan import Prediction
from torchtrim.records.report import Result
from torchtrim.records.trial import Request, Trial
from torchtrim.runner.script import Script
from torchtrim.runner.trials import Progress
from torchtrim.step.from_profile import step_of
from torchtrim.step.simulate import timeline
from torchtrim.workflows.diagnose import TAKEN_AS_CALLS
from torchtrim.workflows.optimize.fitting import Fit, Fitting
from torchtrim.workflows.optimize.levers import reached
from torchtrim.workflows.optimize.report import fitted
from torchtrim.workflows.optimize.trials import NOTHING, MeasuredPlan, measured

_MOST_PARTS = 32  # arbitrary: each doubling costs a run, and smaller parts compute slowly


def optimize_calls_report(
    script: Script,
    memory: str | int | None,
    request: Request,
    *,
    memory_kind: MemoryKind = "allocated",
    progress: Progress = lambda _: None,
) -> Result:
    """Fit a script that only runs its models; without `memory`, into as little as possible."""
    fitting = Fitting(script, replace(request, infers=True), progress)
    limit = None if memory is None else memory_limit(memory, memory_kind)
    result = fitted(script, _fit_calls(fitting, script, limit, memory_kind))
    if memory is None:
        return result._replace(report=replace(result.report, budget_bytes=None))
    return result


def optimize_calls_instead(
    script: Script,
    memory: str | int | None,
    request: Request,
    *,
    memory_kind: MemoryKind = "allocated",
    progress: Progress = lambda _: None,
) -> Result:
    """Fit a script that turned out to only run its models, with a note on that."""
    result = optimize_calls_report(
        script, memory, request, memory_kind=memory_kind, progress=progress
    )
    notes = (TAKEN_AS_CALLS, *result.report.notes)
    return result._replace(report=replace(result.report, notes=notes))


def _fit_calls(
    fitting: Fitting, script: Script, limit: MemoryLimit | None, kind: MemoryKind
) -> Fit:
    """Plan every call; to meet a budget, run the first layers in ever more parts of the batch.

    If no plan fits, return the plan that needs least, and `missed`. Raises `UsageError` if the script trains.
    """
    if script.device not in (None, "cpu", "cuda"):
        raise UsageError(
            f"--device {script.device}: --mode inference plans calls on a real device. Give cpu."
        )
    original = fitting.observe()
    if original.optimizer_steps or original.backwards:
        raise UsageError(
            f"the script trains: it ran {original.backwards} backwards and {original.optimizer_steps} "
            "optimizer steps. --mode inference is for scripts that only run a model; leave it out, and "
            "give --memory."
        )
    whole = measured(original, kind)
    budget = Budget(whole, kind) if limit is None else limit.budget(whole)
    parts = 1
    best: MeasuredPlan | None = None
    notes: tuple[str, ...] = (NOTHING,)
    while parts <= _MOST_PARTS:
        plan = plan_of_calls(
            script.target,
            original.fingerprint,
            CallOptions(gradients_aside=False, parts=parts),
            budget,
            script_sha256=digest_of(script.path) if script.path else "",
        )
        try:
            planned = fitting.run_planned(plan)
        except PlannedStepFailed as error:
            notes = (f"the calls failed with the plan, but not without it: {error}", NOTHING)
            break
        used = measured(planned, kind)
        if used <= (whole if best is None else best.used - 1):
            best = MeasuredPlan(plan, planned, used)
        if limit is None or used <= budget.bytes:
            break
        parts *= 2
    if best is None:
        unchanged = Prediction(peak_bytes=whole, step_seconds=original.seconds)
        nothing = replace(plan, techniques=(), predicted=unchanged)
        fit, used = Fit(original, budget, nothing, None, None, notes), whole
    else:
        chosen, trial, used = best
        assert chosen is not None
        assert trial is not None
        plan = replace(chosen, predicted=_predicted(original, trial))
        certificate = fitting.verify(original, plan, trial)
        fit = Fit(original, budget, with_proof(plan, certificate), trial, certificate, trial.notes)
    met = limit is None or used <= budget.bytes
    return fit if met else _with_missed(fit, budget.bytes, used)


def _with_missed(fit: Fit, budget: int, smallest: int) -> Fit:
    asked, needed = format_apart(budget, smallest)
    missed = InfeasibleBudget(
        f"no plan brings the peak to {asked}. The smallest found needs "
        f"{needed} ({smallest} bytes), the first layers in up to {_MOST_PARTS} parts of "
        f"the batch. Give --memory {smallest} or more, or make the batch smaller.",
        smallest_bytes=smallest,
        set_by="the calls' results and the memory held between calls",
    )
    missed.plan, missed.certificate = fit.plan, fit.certificate
    if fit.planned is not None:
        missed.levers = (reached(fit.plan.techniques, smallest, fit.planned.seconds),)
    return fit._replace(missed=missed, levers=missed.levers)


def _predicted(original: Trial, planned: Trial) -> Prediction:
    """Predict the peak: the memory live when a call begins, and the memory of the call's plan."""
    profile = original.profile
    assert profile is not None
    level = timeline(step_of(profile)).before
    starts = [call.first for call in profile.calls if call.depth == 0 and call.first < len(level)]
    before = max((level[start] for start in starts), default=0)
    peak = before + planned.call_bytes if planned.call_bytes is not None else original.peak_bytes
    return Prediction(peak_bytes=peak, step_seconds=original.seconds, device=original.device)
