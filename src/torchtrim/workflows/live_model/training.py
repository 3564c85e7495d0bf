"""Plans the memory of a model's training step, on its own, applies the plan to the live model, verifies it.

As OptNet's `mode='training'` does, the step is one forward and one backward in which each result is its own
gradient; parameters, buffers and gradients are put back.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from torchtrim.analysis.timeline import WORKSPACE, by_kind, peak_operator
from torchtrim.capture.count import arguments_of
from torchtrim.capture.recording import tensors_in
from torchtrim.capture.workload import TrainStep
from torchtrim.errors import ApplyFailed, UsageError
from torchtrim.executor.apply import Applied, apply_plan
from torchtrim.executor.fingerprint import fingerprint_of
from torchtrim.planner.planner import Planner
from torchtrim.records.budget import Budget, MemoryLimit, memory_limit
from torchtrim.records.memory_table import MemoryTable
from torchtrim.records.plan import Plan
from torchtrim.records.profile import Profile
from torchtrim.records.terms import Terms
from torchtrim.records.trial import Request
from torchtrim.runner.trials import Progress
from torchtrim.workflows.estimate.estimate import Estimate
from torchtrim.workflows.live_model.network import Optimized
from torchtrim.workflows.optimize.fitting import Fitting

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
