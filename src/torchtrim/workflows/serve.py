"""Plans the calls of a script that only runs its models, measures and verifies them."""

from __future__ import annotations

import msgspec

from torchtrim.core.units import format_bytes
from torchtrim.errors import InfeasibleBudget, PlannedStepFailed, UsageError
from torchtrim.executor.apply import sha256_of
from torchtrim.planner.plans import CallOptions, plan_of_calls
from torchtrim.records.budget import Budget, MemoryKind, MemoryLimit, memory_limit
from torchtrim.records.plan import Plan, Prediction
from torchtrim.records.report import Result
from torchtrim.records.trial import Request, Trial
from torchtrim.runner.script import Script
from torchtrim.runner.trials import Progress
from torchtrim.step.from_profile import step_of
from torchtrim.step.simulate import timeline
from torchtrim.workflows.diagnose import TAKEN_AS_CALLS
from torchtrim.workflows.optimize.fitting import Fit, Fitting
from torchtrim.workflows.optimize.levers import Reached
from torchtrim.workflows.optimize.report import fitted
from torchtrim.workflows.optimize.trials import NOTHING, MeasuredPlan, measured

_MOST_PARTS = 32
RELEASE = "release"


def optimize_calls_report(
    script: Script,
    memory: str | int | None,
    request: Request,
    *,
    memory_kind: MemoryKind = "allocated",
    progress: Progress = lambda _: None,
) -> Result:
    """The loop for a script that only runs its models; without `memory` in as little as can be."""
    fitting = Fitting(script, msgspec.structs.replace(request, infers=True), progress)
    limit = None if memory is None else memory_limit(memory, memory_kind)
    found = fit_calls(fitting, script, limit, memory_kind)
    result = fitted(script, found)
    if memory is None:
        return result._replace(report=msgspec.structs.replace(result.report, budget_bytes=None))
    return result


def optimize_calls_instead(
    script: Script,
    memory: str | int | None,
    request: Request,
    *,
    memory_kind: MemoryKind = "allocated",
    progress: Progress = lambda _: None,
) -> Result:
    """As `optimize_calls_report`, for a script of which nobody has said that it only runs its models."""
    found = optimize_calls_report(
        script, memory, request, memory_kind=memory_kind, progress=progress
    )
    notes = (TAKEN_AS_CALLS, *found.report.notes)
    return found._replace(report=msgspec.structs.replace(found.report, notes=notes))


def fit_calls(fitting: Fitting, script: Script, limit: MemoryLimit | None, kind: MemoryKind) -> Fit:
    """Plan every call; where a budget wants less, the first layers in ever more parts of the batch.

    Where nothing fits it gives the plan that needs least, and `missed`. Raises `UsageError` for a script that
    trains.
    """
    if script.device not in (None, "cpu", "cuda"):
        raise UsageError(
            f"--device {script.device}: --mode inference plans calls on a device that is there. Give cpu."
        )
    original = fitting.observe()
    _check(original)
    whole = measured(original, kind)
    budget = Budget(whole, kind) if limit is None else limit.budget(whole)
    parts = 1
    best: MeasuredPlan | None = None
    notes: tuple[str, ...] = (NOTHING,)
    while parts <= _MOST_PARTS:
        plan = _plan(script, original, budget, parts)
        try:
            planned = fitting.run_planned(plan)
        except PlannedStepFailed as error:
            notes = (f"the calls failed as planned, and not as they are: {error}", NOTHING)
            break
        used = measured(planned, kind)
        if used <= (whole if best is None else best.used - 1):
            best = MeasuredPlan(plan, planned, used)
        if limit is None or used <= budget.bytes:
            break
        parts *= 2
    nothing = Fit(original, budget, _nothing(plan, whole, original), None, None, notes)
    found = nothing if best is None else _verified(fitting, original, budget, best)
    used = whole if best is None else best.used
    met = limit is None or used <= budget.bytes
    return found if met else _with_missed(found, budget.bytes, used)


def _nothing(plan: Plan, whole: int, original: Trial) -> Plan:
    """The plan that changes nothing."""
    as_it_is = Prediction(peak_bytes=whole, step_seconds=original.seconds)
    return msgspec.structs.replace(plan, techniques=(), predicted=as_it_is)


def _with_missed(found: Fit, budget: int, smallest: int) -> Fit:
    missed = _missed(budget, smallest)
    missed.plan, missed.certificate = found.plan, found.certificate
    if found.planned is not None:
        reached = Reached(found.plan.techniques, smallest, found.planned.seconds)
        missed.levers = (reached.lever,)
    return found._replace(missed=missed, levers=missed.levers)


def _verified(fitting: Fitting, original: Trial, budget: Budget, best: MeasuredPlan) -> Fit:
    assert best.plan is not None
    assert best.trial is not None
    plan = msgspec.structs.replace(best.plan, predicted=_predicted(original, best.trial))
    certificate = fitting.verify(original, plan, best.trial)
    return Fit(original, budget, plan, best.trial, certificate, best.trial.notes)


def _missed(budget: int, smallest: int) -> InfeasibleBudget:
    return InfeasibleBudget(
        f"no plan brings the peak to {format_bytes(budget)}. The smallest found needs "
        f"{format_bytes(smallest)} ({smallest} bytes), the first layers in up to {_MOST_PARTS} parts of "
        f"the batch. Give --memory {smallest} or more, or make the batch smaller.",
        smallest_bytes=smallest,
        set_by="the calls' results and what is there always",
    )


def is_of_calls(plan: Plan) -> bool:
    """Whether the plan is one of calls without gradients."""
    return any(one.name == RELEASE for one in plan.techniques)


def _check(trial: Trial) -> None:
    if trial.optimizer_steps or trial.backwards:
        raise UsageError(
            f"the script trains: it ran {trial.backwards} backwards and {trial.optimizer_steps} "
            "optimizer steps. --mode inference is for scripts that only run a model; leave it out, and "
            "give --memory."
        )


def _plan(script: Script, original: Trial, budget: Budget, parts: int) -> Plan:
    path = script.path
    return plan_of_calls(
        script.target,
        original.fingerprint,
        CallOptions(gradients_aside=False, parts=parts),
        budget,
        script_sha256=sha256_of(path) if path else "",
    )


def _predicted(original: Trial, planned: Trial) -> Prediction:
    """What the calls' plans predict: what is there when a call begins, and what the plan needs."""
    profile = original.profile
    assert profile is not None
    level = timeline(step_of(profile)).before
    starts = [call.first for call in profile.calls if call.depth == 0 and call.first < len(level)]
    before = max((level[start] for start in starts), default=0)
    peak = before + planned.call_bytes if planned.call_bytes is not None else original.peak_bytes
    return Prediction(peak_bytes=peak, step_seconds=original.seconds)
