"""Checks of the emulated device against a real one: the battery of `torchtrim doctor --gpu FILE`, in minutes.

Each check computes what is modelled and what the device does, and fails alone.
"""

from __future__ import annotations

import platform
import warnings
from collections import Counter
from collections.abc import Callable
from typing import Any

import msgspec
import torch
from torch import nn

from torchtrim.capture.recording import record_call
from torchtrim.core.units import format_bytes
from torchtrim.emulator.device import emulate
from torchtrim.emulator.runtime import DeviceModel
from torchtrim.errors import UsageError
from torchtrim.records.battery import BatteryReport, Check
from torchtrim.records.profile import Profile
from torchtrim.records.snapshot import Snapshot
from torchtrim.traces.snapshots.recording import recordings
from torchtrim.traces.snapshots.replay import Replay

_CLOSE = 0.02  # Of peaks: the worst of `bench.against_gpus` is below it.
_ALIKE = 0.95  # Of operators, by name and number.
Program = Callable[[], object]


def battery(progress: Callable[[str], None] = lambda _: None) -> BatteryReport:
    """Run all checks on the GPU of this machine. Raises `UsageError` if there is none."""
    if not torch.cuda.is_available():
        raise UsageError(
            "no GPU here: torch.cuda.is_available() is False. The battery compares the emulated device with "
            "a real one, so run it where there is a CUDA or ROCm device, with torch built for it."
        )
    model = _model_here()
    checks = []
    for name, check in _CHECKS.items():
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
    size, count = int(known.total_memory), int(known.multi_processor_count)
    return DeviceModel(name, size, int(known.major), int(known.minor), count)


def _training(model: nn.Module, *shape: int) -> Program:
    """Return a function that makes one step on the device."""
    batch = torch.randn(*shape, device="cpu", dtype=torch.float32)

    def step() -> None:
        live, inputs = model.cuda(), batch.cuda()
        optimizer = torch.optim.AdamW(live.parameters())
        output = live(inputs)
        (output[0] if isinstance(output, tuple) else output).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def _programs() -> dict[str, Program]:
    layer = nn.TransformerEncoderLayer(256, 4, 1024, batch_first=True)
    images = nn.Sequential(nn.Conv2d(3, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU())
    return {
        "perceptron": _training(
            nn.Sequential(nn.Linear(512, 2048), nn.GELU(), nn.Linear(2048, 512)), 256, 512
        ),
        "encoder": _training(nn.TransformerEncoder(layer, 2), 16, 128, 256),
        "convolution": _training(images, 16, 3, 64, 64),
        "recurrent": _training(nn.LSTM(128, 256, batch_first=True), 32, 64, 128),
    }


def _both(program: Program, model: DeviceModel) -> tuple[Profile, Profile, int]:
    """Return the profile on the device and on its model, and the workspaces of the model."""
    real = record_call(program, warmup=1, device="cuda")
    with emulate(model) as emulation:
        modelled = record_call(program, warmup=1, device="emulated")
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
        _programs()["encoder"]()
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
