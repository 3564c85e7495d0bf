"""What holds a plan on a live model: figures, proof, and the way back."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from types import TracebackType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from torchtrim.analysis.timeline import WORKSPACE, by_kind, peak_operator
from torchtrim.capture.count import arguments_of, count_call, count_kept
from torchtrim.capture.recording import tensors_in
from torchtrim.capture.workload import Inference, TrainStep
from torchtrim.core.units import format_bytes
from torchtrim.errors import ApplyFailed, Unsupported, UsageError
from torchtrim.executor.apply import Applied, apply_plan, fingerprint_of
from torchtrim.executor.network.parts import PartsProgram, graph_record
from torchtrim.executor.network.planned import Planned
from torchtrim.executor.network.program import Program
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


class Fitted:
    """A live model that was fitted into a budget. As a context manager it is reverted at the end."""

    def __init__(self, fit: Fit, applied: Applied) -> None:
        self.original: Figures | None = figures_of(fit.original)
        self.planned = figures_of(fit.planned) if fit.planned else None
        self.plan = fit.plan
        self.certificate = fit.certificate
        self._applied = applied

    def revert(self) -> None:
        """Make the model what it was."""
        self._applied.revert()

    def __enter__(self) -> Fitted:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.revert()


class FittedMemory(Fitted):
    """A live model whose calls, or whose training, go by a plan of their memory.

    `before` and `after`: bytes by what they are for. `notes` say what could not be planned, and why, and
    where a call saves nothing or takes longer. `original`, `planned`, `certificate` and `slowdown`, the time
    of a call as a factor of the original's, are None where it was not verified; training has no `slowdown`.
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
        """The network's picture: who shares memory with whom. Raises `Unsupported` where there is none."""
        if self._program is None and not self.notes:
            raise Unsupported(
                "in training no operator's results share memory by a plan: autograd gives it back. Draw "
                "the network with mode='inference', or the step's memory with torchtrim.record."
            )
        if self._program is None:
            raise Unsupported(f"there is no graph of the whole to draw: {'; '.join(self.notes)}.")
        return NetworkPicture(graph_record(self.plan.script, self._program))


_MOST_CALLS, _PATIENCE = 5, 0.5
_LONGER, _LESS, _NOISE = 1.05, 0.99, 0.001
"""Factors of time and bytes, and seconds: smaller differences are noise."""


class Optimized(NamedTuple):
    """A model that runs by a plan. `fit` is None where it was not verified.

    `program` is None where its graph could not be had; `notes` say why, and where the plan does not pay.
    `seconds`: of a call before and with the plan, where it was verified.
    """

    plan: Plan
    before: MemoryTable
    after: MemoryTable
    program: Program | PartsProgram | None
    applied: Applied
    fit: Fit | None
    notes: tuple[str, ...]
    seconds: tuple[float, float] | None = None

    @property
    def slowdown(self) -> float | None:
        """The time of a planned call as a factor of the original's."""
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
    """Plan, verify, apply. Raises `ApplyFailed` if it does not compute the same, the model as it was."""
    if memory is not None:
        raise UsageError(
            "memory is for mode='training'; mode='inference' takes as little as it can."
        )
    check(model, options)
    before = table_of(model, inputs)
    plan = plan_for(model, options, before.outputs)
    applied, program, notes = _tried(model, inputs, plan)
    try:
        after = table_of(model, inputs, program)
        predicted = Prediction(peak_bytes=after.total, step_seconds=0.0)
        plan = plan_for(model, options, before.outputs, predicted)
        fit = seconds = None
        if verify:
            applied.revert()
            fit = _verified(model, inputs, plan, before.total, progress)
            plain = seconds_of_call(model, inputs)
            applied = apply_plan(plan, {type(model).__name__: model})
            seconds = plain, seconds_of_call(model, inputs)
            notes = (*notes, *_costs(fit, before, *seconds))
    except BaseException:
        applied.revert()
        raise
    return Optimized(plan, before, after, program, applied, fit, notes, seconds)


def _costs(fit: Fit, table: MemoryTable, before: float, after: float) -> Iterator[str]:
    """Where the plan does not pay: what was measured of a call."""
    assert fit.planned is not None
    model = table.parameters + table.buffers + table.gradients
    original, planned = (one.peak_bytes - model for one in (fit.original, fit.planned))
    if planned > _LESS * original:
        yield (
            f"nothing is saved: beside the model a call takes {format_bytes(max(planned, 0))} at its peak, "
            f"and {format_bytes(max(original, 0))} without the plan. Call `revert()`"
        )
    if after > max(_LONGER * before, before + _NOISE):
        yield (
            f"a call takes {after / before:.2f} times as long: {1e3 * after:.1f} ms, where it was "
            f"{1e3 * before:.1f}"
        )


def seconds_of_call(model: nn.Module, inputs: Any) -> float:
    """The quickest of some calls, in seconds, after one that does not count."""
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
    """The bytes of a model and of one call, by the plan that is applied to it if there is one."""
    planned = Planned.known(model)
    args, kwargs = arguments_of(inputs)
    return table_of(model, inputs, planned.program(*args, **kwargs) if planned else None)


def check(model: nn.Module, options: CallOptions) -> None:
    """Raises `UsageError` for what cannot be meant."""
    if not isinstance(model, nn.Module):
        raise UsageError(
            f"a {type(model).__name__} is no torch.nn.Module. Wrap the function in one, so that it is "
            "known which parameters belong to it."
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
    """The plan that these options make."""
    name = type(model).__name__
    fingerprint = {name: fingerprint_of(model)}
    return plan_of_calls(name, fingerprint, options, Budget(budget), predicted=predicted)


def table_of(
    model: nn.Module, inputs: Any, program: Program | PartsProgram | None = None
) -> MemoryTable:
    """The bytes of a model and of one call, planned if there is a program for it."""
    kept = count_kept(model)
    if program is not None:
        most, made = program.output_bytes, program.made_bytes
    else:
        most, made = count_call(model, inputs)
    return MemoryTable(
        outputs=most,
        made=made,
        workspace=program.peak_bytes - most if program is not None else 0,
        parameters=kept.parameters,
        buffers=kept.buffers,
        gradients=kept.gradients,
        planned=program is not None,
    )


def _tried(
    model: nn.Module, inputs: Any, plan: Plan
) -> tuple[Applied, Program | PartsProgram | None, tuple[str, ...]]:
    """The plan, applied, the program of these inputs, and what there is to say."""
    applied = apply_plan(plan, {type(model).__name__: model})
    try:
        planned = Planned.of(model)
        args, kwargs = arguments_of(inputs)
        program = planned.program(*args, **kwargs)
    except BaseException:
        applied.revert()
        raise
    return applied, program, planned.reasons()


def _verified(model: nn.Module, inputs: Any, plan: Plan, budget: int, progress: Progress) -> Fit:
    """Run the original and the planned on the inputs and on the same in another order."""
    fitting = Fitting(Inference(model, inputs), Request(steps=2, warmup=0), progress)
    original = fitting.observe()
    planned = fitting.run_planned(plan)
    certificate = fitting.verify(original, plan, planned)
    if certificate.verdict == "NOT EQUAL":
        raise ApplyFailed(
            f"the planned call does not equal the original: {certificate.reason}. The model is as it "
            "was. Leave out what differs: inplace=False, reuse_buffers=False, split_batch=1."
        )
    return Fit(original, Budget(budget), plan, planned, certificate, ())


_OF_OPTIMIZERS = ("optimizer_in_backward", "plain_optimizer")
"""The optimizer is ours, not the user's."""


def step_of(model: nn.Module, inputs: Any) -> TrainStep:
    """One forward and backward of the model. Raises `UsageError` where nothing wants a gradient."""
    wanting = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if not wanting:
        raise UsageError(
            f"no parameter of {type(model).__name__} wants a gradient, so there is nothing to train. "
            "Use mode='inference', or requires_grad_() on what is to be trained."
        )
    return TrainStep(model, _own_gradients, torch.optim.SGD(wanting, 1e-3), inputs)


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
    """Plan for a budget, or for as little as is found; verify; apply.

    Raises `InfeasibleBudget`, and `ApplyFailed` if it does not compute the same, the model as it was.
    Without `verify` nothing is computed: the plan is that of a dry run.
    """
    if split_batch != 1:
        raise UsageError("split_batch is for mode='inference': in training its sum would differ.")
    limit = None if memory is None else memory_limit(memory)
    step, left = (
        step_of(model, inputs),
        _OF_OPTIMIZERS if inplace else (*_OF_OPTIMIZERS, "overwrite"),
    )
    if not verify:
        return _planned_dry(step, limit, left, progress)
    fitting = Fitting(step, Request(steps=2), progress, Terms(exclude=left))
    fit = fitting.smallest() if limit is None else fitting.fit(limit)
    if fit.certificate is not None and fit.certificate.verdict == "NOT EQUAL":
        raise ApplyFailed(
            f"the planned step does not equal the original: {fit.certificate.reason}. The model is as "
            "it was."
        )
    assert fit.original.profile is not None
    before = table_of_step(fit.original.profile)
    planned = fit.planned.profile if fit.planned is not None else None
    after = table_of_step(planned) if planned is not None else before
    applied = apply_plan(fit.plan, _roots(model))
    return Optimized(fit.plan, before, after, None, applied, fit, fit.notes)


def table_of_training(model: nn.Module, inputs: Any) -> MemoryTable:
    """The bytes of one forward and backward at its peak; nothing is computed."""
    return table_of_step(Estimate(step_of(model, inputs)).profile)


def table_of_step(profile: Profile) -> MemoryTable:
    """The bytes at a step's peak, the batch left out, and of all results together."""
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
    plan = _plan(profile, step.model, limit, exclude)
    applied: Applied = apply_plan(plan, _roots(step.model))
    try:
        after = table_of_step(Estimate(step, progress=progress).profile)
    except BaseException:
        applied.revert()
        raise
    return Optimized(plan, table_of_step(profile), after, None, applied, None, ())


def _plan(
    profile: Profile, model: nn.Module, limit: MemoryLimit | None, exclude: tuple[str, ...]
) -> Plan:
    planner = Planner(
        profile,
        step_seconds=profile.step_seconds,
        fingerprint={type(model).__name__: fingerprint_of(model)},
        exclude=exclude,
    )
    bias = profile.peak_bytes - planner.simulated_original
    if limit is None:
        return planner.floor_plan(Budget(profile.peak_bytes, bias=bias))
    return planner.plan(limit.budget(profile.peak_bytes).biased(bias))


def _roots(model: nn.Module) -> dict[str, nn.Module]:
    return {type(model).__name__: model}


def _own_gradients(model: nn.Module, inputs: Any) -> Tensor:
    """A loss whose gradient with respect to each result is that result."""
    args, kwargs = arguments_of(inputs)
    results = [one for one in tensors_in(model(*args, **kwargs)) if one.requires_grad]
    if not results:
        raise UsageError(f"no result of {type(model).__name__} has a gradient to be trained by.")
    return torch.stack([one.flatten() @ one.detach().flatten() for one in results]).sum()
