"""Plans the memory of a model's calls by its graph, applies the plan to the live model, and verifies it."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from torchtrim.capture.count import arguments_of, count_call, count_kept
from torchtrim.capture.workload import Inference, batch_of
from torchtrim.core.units import format_bytes
from torchtrim.errors import ApplyFailed, UsageError
from torchtrim.executor.apply import Applied, apply_plan
from torchtrim.executor.fingerprint import fingerprint_of
from torchtrim.executor.network.parts import PartsProgram
from torchtrim.executor.network.planned import Planned
from torchtrim.executor.network.program import Program
from torchtrim.planner.calls import CallOptions, plan_of_calls
from torchtrim.records.budget import Budget
from torchtrim.records.memory_table import MemoryTable
from torchtrim.records.plan import Plan, Prediction
from torchtrim.records.trial import Request
from torchtrim.report.saving import Saving
from torchtrim.runner.trials import Progress
from torchtrim.workflows.optimize.fitting import Fit, Fitting

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


def optimize(
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


def tables_by_batch(
    model: nn.Module, inputs: Any, options: CallOptions, batches: Sequence[int]
) -> list[tuple[int, MemoryTable, MemoryTable]]:
    """`(size, as it is, planned)` for batches of these sizes; nothing is computed."""
    check(model, options)
    sized = {size: batch_of(inputs, size) for size in batches}
    before = {size: table_of(model, given) for size, given in sized.items()}
    applied = apply_plan(plan_for(model, options, 0), {type(model).__name__: model})
    try:
        planned = Planned.of(model)
        programs = {
            size: planned.program(*args, **kwargs)
            for size, (args, kwargs) in ((n, arguments_of(given)) for n, given in sized.items())
        }
        return [(n, before[n], table_of(model, sized[n], programs[n])) for n in sized]
    finally:
        applied.revert()


def savings_by_batch(model: nn.Module, inputs: Any, batches: Sequence[int]) -> list[Saving]:
    """What planning a call would save, by the size of the batch; nothing is computed."""
    if not batches or any(size < 1 for size in batches):
        raise UsageError(f"batches={tuple(batches)}: give sizes of 1 or more.")
    return [Saving(*one) for one in tables_by_batch(model, inputs, CallOptions(), batches)]


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
