"""Checks of the emulated device against a real one: the battery of `torchtrim doctor --gpu FILE`, in minutes.

Each check computes what is modelled and what the device does, and fails alone.
"""

from __future__ import annotations

import copy
import functools
import platform
import statistics
import time
import warnings
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import torch
from torch import nn

from torchtrim.capture.recording import record_call
from torchtrim.capture.workload import TrainStep
from torchtrim.core.units import format_bytes
from torchtrim.emulator.device import emulate
from torchtrim.emulator.runtime import MODELS, DeviceModel
from torchtrim.errors import UsageError
from torchtrim.executor import notices
from torchtrim.executor.apply import apply_plan, named_roots
from torchtrim.executor.registry import names
from torchtrim.planner.planner import Planner
from torchtrim.records.battery import BatteryReport, Check
from torchtrim.records.budget import Budget
from torchtrim.records.plan import Plan
from torchtrim.records.profile import Profile
from torchtrim.records.snapshot import Snapshot
from torchtrim.records.trial import Request
from torchtrim.report.facts import peak_after
from torchtrim.runner.script import Script
from torchtrim.traces.snapshots.recording import recordings
from torchtrim.traces.snapshots.replay import Replay
from torchtrim.workflows.diagnose import record
from torchtrim.workflows.optimize.report import optimize_report
from torchtrim.workflows.verify import verify_report

_CLOSE = 0.02  # Of peaks: the worst of `bench.against_gpus` is below it.
_ALIKE = 0.95  # Of operators, by name and number.
_SHARE = 0.7  # Of the peak, which plans are made for: arbitrary, in reach of all programs.
_OF_SCRIPTS = "70%"
_TIMED = 10  # Steps, after as many that are not timed.
_NOISE = 0.1  # Of a step: times of a quiet GPU differ by less.
Program = Callable[[], TrainStep]


def battery(
    progress: Callable[[str], None] = lambda _: None, scripts: Sequence[Path] = ()
) -> BatteryReport:
    """Run all checks on the GPU of this machine, and plan the scripts for it and verify them on it.

    Raises `UsageError` if there is no GPU.
    """
    if not torch.cuda.is_available():
        raise UsageError(
            "no GPU here: torch.cuda.is_available() is False. The battery compares the emulated device with "
            "a real one, so run it where there is a CUDA or ROCm device, with torch built for it."
        )
    model = _model_here()
    checks = []
    named = _CHECKS | {path.name: functools.partial(check_script_on, path) for path in scripts}
    for name, check in named.items():
        progress(name)
        try:
            checks.append(check(model))
        except Exception as error:  # A part that fails, fails alone.
            checks.append(Check(name=name, holds=False, error=f"{type(error).__name__}: {error}"))
    return BatteryReport(
        device=model.name,
        capability=f"{model.major}.{model.minor}",
        torch=str(torch.__version__),
        system=f"{platform.system()} {platform.machine()}",
        checks=tuple(checks),
    )


def _model_here() -> DeviceModel:
    """Return the model of this machine's device."""
    known = torch.cuda.get_device_properties(0)
    name = f"AMD {known.name}" if torch.version.hip else str(known.name)
    short = next((one.short for one in MODELS.values() if one.name == name), "")
    size, count = int(known.total_memory), int(known.multi_processor_count)
    return DeviceModel(name, size, int(known.major), int(known.minor), count, short)


def _stepping(model: nn.Module, *shape: int) -> Program:
    """Return a function that makes a training step on the device, from the same numbers each time."""
    batch = torch.randn(*shape, device="cpu", dtype=torch.float32)

    def loss(live: nn.Module, inputs: torch.Tensor) -> torch.Tensor:
        output = live(inputs)
        found: torch.Tensor = output[0] if isinstance(output, tuple) else output
        return found.square().mean()

    def make() -> TrainStep:
        live = copy.deepcopy(model).cuda()
        torch.manual_seed(0)
        return TrainStep(live, loss, torch.optim.AdamW(live.parameters()), batch.cuda())

    return make


def _programs() -> dict[str, Program]:
    layer = nn.TransformerEncoderLayer(256, 4, 1024, batch_first=True)
    images = nn.Sequential(nn.Conv2d(3, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU())
    return {
        "perceptron": _stepping(
            nn.Sequential(nn.Linear(512, 2048), nn.GELU(), nn.Linear(2048, 512)), 256, 512
        ),
        "encoder": _stepping(nn.TransformerEncoder(layer, 2), 16, 128, 256),
        "convolution": _stepping(images, 16, 3, 64, 64),
        "recurrent": _stepping(nn.LSTM(128, 256, batch_first=True), 32, 64, 128),
    }


def _both(program: Program, model: DeviceModel) -> tuple[Profile, Profile, int]:
    """Return the profile on the device and on its model, and the workspaces of the model."""
    real = record_call(functools.partial(program().step, 0), warmup=1, device="cuda")
    with emulate(model) as emulation:
        step = functools.partial(program().step, 0)
        modelled = record_call(step, warmup=1, device="emulated")
        return real, modelled, emulation.workspaces.bytes


def _operators(model: DeviceModel) -> Check:
    """A few training steps run the model's operators."""
    found: dict[str, Any] = {}
    shares = []
    for name, program in _programs().items():
        real, modelled, _ = _both(program, model)
        here, there = (Counter(op.name for op in each.operators) for each in (modelled, real))
        shares.append((here & there).total() / max(here.total(), there.total(), 1))
        found[name] = {"only modelled": dict(here - there), "only there": dict(there - here)}
    return Check(name="operators", holds=min(shares) >= _ALIKE, seen=shares, details=found)


def _bytes(model: DeviceModel) -> Check:
    """A few training steps reach the model's peaks."""
    found: dict[str, Any] = {}
    for name, program in _programs().items():
        real, modelled, beside = _both(program, model)
        found[name] = [real.peak_bytes, modelled.peak_bytes + beside]
    holds = all(abs(there / real - 1) <= _CLOSE for real, there in found.values())
    return Check(name="bytes", holds=holds, details=found)


class _Ran(NamedTuple):
    """A few steps on the device: parameters, the peak, seconds of a step, and notes on the plan."""

    parameters: list[torch.Tensor]
    peak: int
    seconds: float
    said: list[str]


def _ran(program: Program, plan: Plan | None) -> _Ran:
    """Run a program on the device, planned or not."""
    said: list[str] = []
    before = torch.cuda.memory_allocated()
    work = program()
    listen: Callable[[str, str], None] = lambda where, text: said.append(f"{where}: {text}")  # noqa: E731
    notices.listeners.append(listen)
    try:
        if plan is not None:
            apply_plan(plan, named_roots((work.model, *work.optimizers)))
        for number in range(_TIMED):
            work.step(number)
        torch.cuda.reset_peak_memory_stats()
        seconds = [_timed(work, number) for number in range(_TIMED)]
    finally:
        notices.listeners.remove(listen)
    parameters = [one.detach().cpu() for one in work.model.parameters()]
    peak = torch.cuda.max_memory_allocated() - before
    return _Ran(parameters, peak, statistics.median(seconds), said)


def _timed(work: TrainStep, number: int) -> float:
    torch.cuda.synchronize()
    begin = time.perf_counter()
    work.step(number)
    torch.cuda.synchronize()
    return time.perf_counter() - begin


def _planned(program: Program, model: DeviceModel, exclude: Collection[str] = ()) -> Plan:
    """Plan a program on the model of the device."""
    with emulate(model):
        profile = record(program(), 1, lambda _: None)
    planner = Planner(profile, step_seconds=1.0, fingerprint={}, exclude=exclude)
    least = planner.floor.outcome.peak_bytes
    return planner.plan(Budget(max(least, int(_SHARE * profile.peak_bytes))))


def _same(one: _Ran, other: _Ran) -> bool:
    return all(map(torch.equal, one.parameters, other.parameters))


def _plans(model: DeviceModel) -> Check:
    """Plans made on the model apply on the device whole, with the same bits and the predicted peak."""
    found: dict[str, Any] = {}
    holds = True
    for name, program in _programs().items():
        plan = _planned(program, model)
        plain, planned = _ran(program, None), _ran(program, plan)
        same = _same(plain, planned)
        expected = plan.predicted.peak_bytes
        found[name] = {
            "places": sum(len(one.where) for one in plan.techniques),
            "said": planned.said,
            "same bits": same,
            "peak": [plain.peak, planned.peak, expected],
        }
        holds &= same and not planned.said and abs(expected / planned.peak - 1) <= _CLOSE
    return Check(name="plans", holds=holds, details=found)


def _offload(model: DeviceModel) -> Check:
    """Offloaded activations delay a step by no more than predicted."""
    program = _programs()["encoder"]
    plan = _planned(program, model, {*names()} - {"offload_activations"})
    plain, planned = _ran(program, None), _ran(program, plan)
    added, stall = planned.seconds - plain.seconds, plan.predicted.stall_seconds
    return Check(
        name="offload",
        holds=_same(plain, planned) and added <= stall + _NOISE * plain.seconds,
        expected=stall,
        seen=added,
        details={"step": plain.seconds, "places": [one.where for one in plan.techniques]},
    )


def check_script_on(path: Path, model: DeviceModel, device: str = "cuda") -> Check:
    """A script's plan, made and certified on the model, has the same bits and its peak on the device."""
    made = optimize_report(
        Script(str(path), device=model.short or "emulated"), _OF_SCRIPTS, Request()
    )
    if made.plan is None:
        return Check(name=path.name, holds=False, error="no plan was found on the model")
    report = verify_report(Script(str(path), device=device), made.plan, Request()).report
    verdict = "" if report.certificate is None else report.certificate.verdict
    expected, seen = made.plan.predicted.peak_bytes, peak_after(report) or 0
    return Check(
        name=path.name,
        holds=verdict in ("BITWISE", "ROUNDING") and abs(seen / expected - 1) <= _CLOSE,
        expected=expected,
        seen=seen,
        details={"verdict": verdict, "notes": report.notes},
    )


def _workspaces(model: DeviceModel) -> Check:
    """The first product of a thread takes a workspace of the modelled size."""

    def product() -> int:
        a = torch.ones(512, 512, device="cuda", dtype=torch.float32)
        before = torch.cuda.memory_allocated()
        result = a @ a
        return torch.cuda.memory_allocated() - before - result.nbytes

    with emulate(model) as emulation:
        product()
        expected = emulation.workspaces.bytes
    torch._C._cuda_clearCublasWorkspaces()
    seen = product()
    return Check(name="workspaces", holds=seen == expected, expected=expected, seen=seen)


def _allocator(_: DeviceModel) -> Check:
    """The model of the allocator places each block of a recorded step where the device did."""
    memory: Any = torch.cuda.memory
    memory._record_memory_history(max_entries=100_000, context=None)
    try:
        _programs()["encoder"]().step(0)
        plain = memory._snapshot()
    finally:
        memory._record_memory_history(enabled=None)
    recording = recordings(msgspec.convert(plain, Snapshot, strict=False))[0]
    ended = Replay(recording, recording.settings, exact=True).run()
    expected = [ended.allocations, recording.device_calls, recording.peak_reserved]
    seen = [ended.same, ended.device_calls, ended.peak_reserved]
    return Check(name="allocator", holds=seen == expected, expected=expected, seen=seen)


_CALLS: dict[str, Callable[[torch.Tensor], object]] = {
    "item": lambda x: x.sum().item(),
    "nonzero": lambda x: x.nonzero(),
    "mask": lambda x: x[x > 0],
    "masked fill": lambda x: x.masked_fill(x > 0, 0.0),
    "to host": lambda x: x.cpu(),
    "index": lambda x: x[torch.zeros(2, dtype=torch.int64, device="cuda")],
    "unique": torch.unique,
    "product": lambda x: x.view(-1, 1) @ x.view(1, -1),
}


def _syncs(model: DeviceModel) -> Check:
    """The calls of the table wait, and no others."""

    def modelled(call: Callable[[torch.Tensor], object]) -> bool:
        x = torch.arange(16.0, device="cuda", dtype=torch.float32)
        return bool(record_call(lambda: call(x), device="emulated").syncs)

    with emulate(model):
        expected = {name: modelled(call) for name, call in _CALLS.items()}
    seen = {name: _waits(call) for name, call in _CALLS.items()}
    return Check(name="syncs", holds=seen == expected, expected=expected, seen=seen)


def _waits(call: Callable[[torch.Tensor], object]) -> bool:
    """Return True if torch warns that a call synchronizes."""
    x = torch.arange(16.0, device="cuda", dtype=torch.float32)
    call(x)
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            call(x)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return any("synchroniz" in str(one.message) for one in said)


_CHECKS: dict[str, Callable[[DeviceModel], Check]] = {
    "operators": _operators,
    "bytes": _bytes,
    "plans": _plans,
    "offload": _offload,
    "workspaces": _workspaces,
    "allocator": _allocator,
    "syncs": _syncs,
}


def battery_lines(report: BatteryReport) -> list[str]:
    """Return what the report says, a line for each check."""
    lines = [f"{report.device}, capability {report.capability}, torch {report.torch}"]
    for check in report.checks:
        word = "holds" if check.holds else "FAILED" if check.error else "differs"
        more = check.error or (
            "" if check.holds else f"expected {check.expected}, seen {check.seen}"
        )
        if check.name == "workspaces" and check.holds:
            more = format_bytes(int(check.expected))
        lines.append(f"{check.name:12} {word:8} {more}".rstrip())
    return lines
