"""Live models with a plan: its figures, its certificate, and the revert."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from torchtrim.analysis.timeline import WORKSPACE, by_kind, peak_operator
from torchtrim.capture.count import arguments_of, count_call, count_resident
from torchtrim.capture.recording import tensors_in
from torchtrim.capture.workload import Inference, TrainStep
from torchtrim.core.units import format_bytes
from torchtrim.errors import Unsupported, UsageError
from torchtrim.executor.apply import apply_plan, fingerprint_of
from torchtrim.executor.network.parts import PlannedProgram, graph_record
from torchtrim.executor.network.planned import Planned
from torchtrim.executor.registry import Handles
from torchtrim.planner.planner import Planner
from torchtrim.planner.plans import CallOptions, plan_of_calls
from torchtrim.records.budget import Budget, MemoryLimit, memory_limit
from torchtrim.records.estimate import MemoryTable
from torchtrim.records.plan import Plan, Prediction
from torchtrim.records.profile import Profile
from torchtrim.records.report import Figures
from torchtrim.records.terms import Terms
from torchtrim.records.trial import Request
from torchtrim.report.assemble import figures_of
from torchtrim.report.network_graph import NetworkPicture
from torchtrim.runner.trials import Progress
from torchtrim.workflows.estimate import Estimate
from torchtrim.workflows.optimize.fitting import Fit, Fitting
from torchtrim.workflows.optimize.trials import check_equal


class Fitted:
    """Live model fitted into a budget; as a context manager, it reverts at the end."""

    def __init__(self, fit: Fit, applied: Handles) -> None:
        self.original: Figures | None = figures_of(fit.original)
        self.planned = figures_of(fit.planned) if fit.planned else None
        self.plan = fit.plan
        self.certificate = fit.certificate
        self._applied = applied

    def revert(self) -> None:
        """Restore the model."""
        self._applied.revert()

    def __enter__(self) -> Fitted:
        return self

    def __exit__(self, *error: object) -> None:
        self.revert()


class FittedMemory(Fitted):
    """Live model with a memory plan of its calls or its training.

    `before` and `after`: bytes by their kind. `notes`: reasons for unplanned parts, and for a plan that saves
    nothing or takes longer. `original`, `planned`, `certificate` and `slowdown`, the time of a call as a
    factor of the original's, are None without verification; training has no `slowdown`.
    """

    def __init__(self, optimized: Optimized) -> None:
        if optimized.fit is not None:
            super().__init__(optimized.fit, optimized.applied)
        else:
            self.original = self.planned = self.certificate = None
            self._applied = optimized.applied
        self.plan = optimized.plan
        self.before = optimized.before
        self.after = optimized.after
        self.notes = optimized.notes
        self.slowdown = optimized.slowdown
        self._program = optimized.program

    def graph(self) -> NetworkPicture:
        """Return a picture of the network's shared memory. Raises `Unsupported` without a graph."""
        if self._program is None and not self.notes:
            raise Unsupported(
                "in training, autograd frees memory, and no plan shares it among operators. Draw the "
                "network with mode='inference', or the step's memory with torchtrim.record."
            )
        if self._program is None:
            raise Unsupported(f"the whole network has no graph to draw: {'; '.join(self.notes)}.")
        return NetworkPicture(graph_record(self.plan.script, self._program))


# Enough calls for one without a disturbance, within a time that nobody notices.
_MOST_CALLS, _PATIENCE = 5, 0.5
_LONGER, _LESS, _NOISE = 1.05, 0.99, 0.001
"""Factors of time and bytes, and seconds: smaller differences are noise."""


_ADVICE = " Leave out an option: inplace=False, reuse_buffers=False, split_batch=1."


class Optimized(NamedTuple):
    """Model with a plan applied. `fit` is None without verification.

    `program` is None if the graph is unknown; `notes` give the reasons, and costs of the plan. `seconds`:
    times of a call before and with the plan, if verified.
    """

    plan: Plan
    before: MemoryTable
    after: MemoryTable
    program: PlannedProgram | None
    applied: Handles
    fit: Fit | None
    notes: tuple[str, ...]
    seconds: tuple[float, float] | None = None

    @property
    def slowdown(self) -> float | None:
        """Time of a planned call as a factor of the original's."""
        return None if self.seconds is None else self.seconds[1] / self.seconds[0]


def optimize_calls(
    model: nn.Module,
    inputs: Any,
    memory: str | int | None,
    options: CallOptions,
    *,
    verify: bool,
    progress: Progress,
) -> Optimized:
    """Plan, verify, apply. Raises `ApplyFailed`, with the model restored, if the calls are not equal."""
    if memory is not None:
        raise UsageError(
            "memory is for mode='training'; mode='inference' takes as little as it can."
        )
    _check(model, options)
    before = _table_of(model, inputs)
    plan = plan_for(model, options, before.outputs)
    applied = apply_plan(plan, _roots(model))
    try:
        planned = Planned.of(model)
        args, kwargs = arguments_of(inputs)
        program, notes = planned.program(*args, **kwargs), planned.reasons()
        after = _table_of(model, inputs, program)
        predicted = Prediction(peak_bytes=after.total, step_seconds=0.0)
        plan = plan_for(model, options, before.outputs, predicted)
        fit = seconds = None
        if verify:
            applied.revert()
            fitting = Fitting(Inference(model, inputs), Request(steps=2, warmup=0), progress)
            original, trial = fitting.observe(), fitting.run_planned(plan)
            certificate = fitting.verify(original, plan, trial)
            check_equal(certificate, "call", _ADVICE)
            fit = Fit(original, Budget(before.total), plan, trial, certificate, ())
            plain = seconds_of_call(model, inputs)
            applied = apply_plan(plan, _roots(model))
            seconds = plain, seconds_of_call(model, inputs)
            notes = (*notes, *_costs(fit, before, *seconds))
    except BaseException:
        applied.revert()
        raise
    return Optimized(plan, before, after, program, applied, fit, notes, seconds)


def _costs(fit: Fit, table: MemoryTable, before: float, after: float) -> Iterator[str]:
    assert fit.planned is not None
    model = table.parameters + table.buffers + table.gradients
    original, planned = (one.peak_bytes - model for one in (fit.original, fit.planned))
    if planned > _LESS * original:
        yield (
            f"the plan saves no memory: apart from the model a call takes {format_bytes(max(planned, 0))} "
            f"at its peak, and {format_bytes(max(original, 0))} without the plan. Call `revert()`"
        )
    if after > max(_LONGER * before, before + _NOISE):
        yield (
            f"a call takes {after / before:.2f} times as long: {1e3 * after:.1f} ms instead of "
            f"{1e3 * before:.1f}"
        )


def seconds_of_call(model: nn.Module, inputs: Any) -> float:
    """Return the seconds of the quickest of some calls, after a warm-up call."""
    work, quickest = Inference(model, inputs), math.inf
    work.step(0)
    until = time.perf_counter() + _PATIENCE
    for _ in range(_MOST_CALLS):
        _wait()
        begin = time.perf_counter()
        work.step(0)
        _wait()
        quickest = min(quickest, time.perf_counter() - begin)
        if time.perf_counter() > until:
            break
    return quickest


def _wait() -> None:
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.synchronize()


def table_of_calls(model: nn.Module, inputs: Any) -> MemoryTable:
    """Return the bytes of a model and of one call, by its applied plan if it has one."""
    planned = Planned.known(model)
    args, kwargs = arguments_of(inputs)
    return _table_of(model, inputs, planned.program(*args, **kwargs) if planned else None)


def _check(model: nn.Module, options: CallOptions) -> None:
    if not isinstance(model, nn.Module):
        raise UsageError(
            f"expected a torch.nn.Module, got {type(model).__name__}. Wrap the function in a module that "
            "has its parameters."
        )
    if model.training:
        raise UsageError(
            f"{type(model).__name__} is in training mode, and mode='inference' is for calls without "
            "gradients. Call model.eval() first, or give mode='training'."
        )
    if options.parts < 1:
        raise UsageError(f"split_batch={options.parts}: give 1 for the whole batch, or more parts.")


def plan_for(
    model: nn.Module, options: CallOptions, budget: int, predicted: Prediction | None = None
) -> Plan:
    """Return the plan of a model's calls with these options."""
    name = type(model).__name__
    fingerprint = {name: fingerprint_of(model)}
    return plan_of_calls(name, fingerprint, options, Budget(budget), predicted=predicted)


def _table_of(model: nn.Module, inputs: Any, program: PlannedProgram | None = None) -> MemoryTable:
    resident = count_resident(model)
    if program is not None:
        most, made = program.output_bytes, program.made_bytes
    else:
        most, made = count_call(model, inputs)
    return MemoryTable(
        outputs=most,
        made=made,
        workspace=program.peak_bytes - most if program is not None else 0,
        parameters=resident.parameters,
        buffers=resident.buffers,
        gradients=resident.gradients,
        planned=program is not None,
    )


_OF_OPTIMIZERS = ("optimizer_in_backward", "plain_optimizer")
"""Excluded, since the optimizer is torchtrim's, not the user's."""


def step_of(model: nn.Module, inputs: Any) -> TrainStep:
    """Return one forward and backward of the model. Raises `UsageError` if no parameter trains."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if not trained:
        raise UsageError(
            f"no parameter of {type(model).__name__} requires a gradient. Use mode='inference', or call "
            "requires_grad_() on the parameters to train."
        )
    return TrainStep(model, _own_gradients, torch.optim.SGD(trained, 1e-3), inputs)


def optimize_step(
    model: nn.Module,
    inputs: Any,
    memory: str | int | None,
    *,
    inplace: bool,
    split_batch: int,
    verify: bool,
    progress: Progress,
) -> Optimized:
    """Plan for a budget, or for the smallest peak; verify; apply.

    Raises `InfeasibleBudget`, and `ApplyFailed`, with the model restored, if the step is not equal. Without
    `verify`, plan by a dry run, which computes no values.
    """
    if split_batch != 1:
        raise UsageError("split_batch is for mode='inference': in training its sum would differ.")
    limit = None if memory is None else memory_limit(memory)
    step = step_of(model, inputs)
    excluded = _OF_OPTIMIZERS if inplace else (*_OF_OPTIMIZERS, "overwrite")
    if not verify:
        return _planned_dry(step, limit, excluded, progress)
    fitting = Fitting(step, Request(steps=2), progress, Terms(exclude=excluded))
    fit = fitting.smallest() if limit is None else fitting.fit(limit)
    check_equal(fit.certificate, "step")
    assert fit.original.profile is not None
    before = _table_of_step(fit.original.profile)
    planned = fit.planned.profile if fit.planned is not None else None
    after = _table_of_step(planned) if planned is not None else before
    applied = apply_plan(fit.plan, _roots(model))
    return Optimized(fit.plan, before, after, None, applied, fit, fit.notes)


def table_of_training(model: nn.Module, inputs: Any) -> MemoryTable:
    """Return the bytes of one forward and backward at its peak, by a dry run."""
    return _table_of_step(Estimate(step_of(model, inputs)).profile)


def _table_of_step(profile: Profile) -> MemoryTable:
    """Return the bytes at a step's peak, without the batch, and of all results together."""
    at = by_kind(profile, peak_operator(profile))
    made = (s.counted for s in profile.storages if s.birth >= 0 and s.kind in _RESULTS)
    return MemoryTable(
        outputs=sum(at[kind] for kind in _RESULTS),
        made=sum(made),
        workspace=at[WORKSPACE],
        buffers=at["buffer"],
        parameters=at["parameter"],
        gradients=at["gradient"],
    )


_RESULTS = ("activation", "temporary")


def _planned_dry(
    step: TrainStep, limit: MemoryLimit | None, exclude: tuple[str, ...], progress: Progress
) -> Optimized:
    profile = Estimate(step, progress=progress).profile
    planner = Planner(
        profile,
        step_seconds=profile.step_seconds,
        fingerprint={type(step.model).__name__: fingerprint_of(step.model)},
        exclude=exclude,
    )
    whole = profile.peak_bytes
    bias = whole - planner.simulated_original
    if limit is None:
        plan = planner.floor_plan(Budget(whole, bias=bias))
    else:
        plan = planner.plan(limit.budget(whole).biased(bias))
    applied: Handles = apply_plan(plan, _roots(step.model))
    try:
        after = _table_of_step(Estimate(step, progress=progress).profile)
    except BaseException:
        applied.revert()
        raise
    return Optimized(plan, _table_of_step(profile), after, None, applied, None, ())


def _roots(model: nn.Module) -> dict[str, nn.Module]:
    return {type(model).__name__: model}


def _own_gradients(model: nn.Module, inputs: Any) -> Tensor:
    """Return a loss whose gradient with respect to each result is the result itself."""
    args, kwargs = arguments_of(inputs)
    results = [result for result in tensors_in(model(*args, **kwargs)) if result.requires_grad]
    if not results:
        raise UsageError(f"no result of {type(model).__name__} requires a gradient.")
    return torch.stack([one.flatten() @ one.detach().flatten() for one in results]).sum()
