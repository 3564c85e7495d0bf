"""Records one step of a watched loop into a profile."""

from __future__ import annotations

import contextlib
import gc
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from msgspec.structs import replace
from torch import nn

from torchtrim.capture.allocator import NOTHING, Allocator, allocator_for
from torchtrim.capture.build import Setting, build
from torchtrim.capture.modules import Modules
from torchtrim.capture.optimizers import OptimizerSteps, parameters_of
from torchtrim.capture.recorder import Recorder
from torchtrim.capture.spent import Spent
from torchtrim.capture.watch import Listener, Watcher
from torchtrim.dispatch.places import Places
from torchtrim.dispatch.profilers import open_ranges
from torchtrim.dispatch.storages import parts_of, storage_bytes
from torchtrim.emulator.device import current, emulate
from torchtrim.records.profile import Call, LoaderWait, Phase, Profile, is_emulated


class _Running(NamedTuple):
    """A running module call: the state to restore after it, and its first operator and inputs."""

    outer: int
    phase: Phase
    first: int
    inputs: tuple[int, ...]
    held: tuple[int, ...]
    depth: int


COPIED_DEPTH = 8
SHARED = (nn.Module, type, str, bytes, int, float, complex, type(None), torch.Generator)
"""Nesting depth to which a recomputed block copies its arguments, and types it shares instead."""


class Recording(Listener):
    """A recording between `begin` and `end`. `allocator`, if given, measures the peak including scratch."""

    def __init__(
        self, modules: Modules, places: Places, setting: Setting, allocator: Allocator | None
    ) -> None:
        self.recorder = Recorder(
            places,
            mark_operators=allocator is not None and allocator.cuts_at_marks,
            device=counted_device(setting.device),
        )
        self._modules = modules
        self._setting = setting
        self._allocator = allocator
        self.alive_bytes = 0
        self._ours_bytes = 0
        self._watched = NOTHING
        self._waits: list[LoaderWait] = []
        self._stack: list[_Running] = []
        self._phases: list[Phase] = []
        self._optimizer_steps = OptimizerSteps(self._storages, lambda: len(self.recorder.operators))
        self.running = False

    def begin(
        self,
        optimizers: Sequence[torch.optim.Optimizer],
        *,
        scan: bool = True,
        ours: Sequence[Any] = (),
    ) -> None:
        """Start with the tensors alive now. `scan`: collect garbage and find tensors through the collector.

        `ours`: storages of torchtrim itself, which are not counted.
        """
        if scan:
            gc.collect()
        for storage in ours:
            self.recorder.storages.exclude(storage)
        self._ours_bytes = storage_bytes(ours, counted_device(self._setting.device))
        self.recorder.track(tensor for _, _, tensor in self._modules.named_tensors())
        self.recorder.track(p for optimizer in optimizers for p in parameters_of(optimizer))
        self.recorder.track(tensor for _, tensor in _states(optimizers))
        self.recorder.track(gradient for _, gradient in _gradients(self._modules, optimizers))
        for label in _open_labels():
            self.recorder.open_label(label)
        if self._allocator is not None:
            self._allocator.start()
        self.recorder.start(scan=scan)
        self._name(optimizers)
        self._optimizer_steps.begin(optimizers)
        self.running = True

    def pause(self) -> None:
        """Stop recording; `end` then returns the profile up to here."""
        if self.running:
            self.running = False
            self._optimizer_steps.stop()
            self.recorder.stop()
            if self._allocator is not None:
                self._watched = self._allocator.stop()

    def abandon(self) -> None:
        """Stop without a profile."""
        self.pause()
        self.recorder.storages.forget()

    def end(self, optimizers: Sequence[torch.optim.Optimizer]) -> Profile:
        """Stop recording and return the profile."""
        self._name(optimizers)
        self.pause()
        watched = self._watched
        storages = self.recorder.storages
        storages.forget()
        known = sum(
            life.bytes for life in storages.lives if life.birth < 0 and storages.counts(life)
        )
        baseline = known if watched.before is None else watched.before - self._ours_bytes
        self.alive_bytes = baseline + watched.end
        profile = build(self.recorder, self._modules, self._waits, watched, baseline, self._setting)
        return replace(profile, optimizer_steps=self._optimizer_steps.named(optimizers))

    def module_starts(self, module: nn.Module, args: Any, kwargs: Any, depth: int) -> None:
        recorder = self.recorder
        number = self._modules.number(module)
        inputs, held = self._given((args, kwargs)) if depth >= 0 else ((), ())
        self._stack.append(
            _Running(recorder.module, recorder.phase, len(recorder.operators), inputs, held, depth)
        )
        recorder.module = number if number >= 0 else recorder.module
        recorder.recomputing += depth < 0
        if depth == 0:
            recorder.phase = "forward"

    def module_ends(self, module: nn.Module, output: Any, depth: int) -> None:
        if not self._stack:
            return
        recorder = self.recorder
        number = self._modules.number(module)
        running = self._stack.pop()
        recorder.module = running.outer
        recorder.recomputing -= running.depth < 0
        graded = torch.is_grad_enabled()
        if running.depth == 0 and not graded:
            recorder.phase = running.phase
        elif running.depth == 0:
            recorder.saved.read(tensors_in(output))
        if running.depth >= 0 and number >= 0:
            last = len(recorder.operators)
            outputs = self._storages(output, "")
            given, depth = (running.inputs, outputs, graded, running.held), running.depth
            recorder.calls.append(Call(number, running.first, last, depth, *given))

    def backward_starts(self, tensors: tuple[torch.Tensor, ...]) -> None:
        self._phase_starts("backward")

    def backward_ends(self) -> None:
        self._phase_ends()

    def optimizer_starts(self, optimizer: torch.optim.Optimizer) -> None:
        self._phase_starts("optimizer")
        self._name_made((optimizer,))
        self._optimizer_steps.starts()

    def optimizer_ends(self, optimizer: torch.optim.Optimizer) -> None:
        self._phase_ends()
        self._name_made((optimizer,))
        self._optimizer_steps.ends(optimizer)

    def update_starts(self, optimizer: torch.optim.Optimizer, parameter: torch.Tensor) -> None:
        if parameter.grad is not None:
            storages = self.recorder.storages
            name = storages.lives[storages.see(parameter, -1, "parameter")].name
            self.recorder.name(parameter.grad, "gradient", name)
        self._phase_starts("optimizer")

    def update_ends(self, optimizer: torch.optim.Optimizer, parameter: torch.Tensor) -> None:
        self._phase_ends()

    def _phase_starts(self, phase: Phase) -> None:
        self._phases.append(phase)
        self.recorder.phase = phase

    def _phase_ends(self) -> None:
        """Restore the outer phase: an optimizer may call a closure that calls backward."""
        if self._phases:
            self._phases.pop()
        self.recorder.phase = self._phases[-1] if self._phases else "other"

    def loader_waited(self, start_ns: int, end_ns: int, workers: int) -> None:
        recorder = self.recorder
        start = max(start_ns - recorder.start_ns, 0) / 1e9
        self._waits.append(LoaderWait(start, (end_ns - start_ns) / 1e9, workers))
        for i in range(len(recorder.operators) - 1, -1, -1):
            if recorder.operators[i].start_ns < start_ns:
                break
            recorder.operators[i] = recorder.operators[i]._replace(phase="loader")

    def _given(self, values: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return the storages of tensor arguments, and known storages inside object arguments."""
        inputs, number = self._storages(values, "input"), self.recorder.storages.number
        behind = dict.fromkeys(number(p) for one in tensors_behind(values) for p in parts_of(one))
        return inputs, tuple(one for one in behind if one >= 0 and one not in inputs)

    def _storages(self, values: Any, kind: str) -> tuple[int, ...]:
        """Return the storages of the tensors in a value; new ones get this `kind`."""
        storages = self.recorder.storages
        now = len(self.recorder.operators) - 1
        numbers = [
            storages.see(part, now, kind)
            for tensor in tensors_in(values)
            for part in parts_of(tensor)
        ]
        return tuple(dict.fromkeys(number for number in numbers if number >= 0))

    def _name(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        """Name all storages. Later names win: a module's parameter gets the module's name."""
        for name, parameter in _parameters(optimizers):
            self.recorder.name(parameter, "parameter", name)
        self._name_made(optimizers)
        for kind, name, tensor in self._modules.named_tensors():
            self.recorder.name(tensor, kind, name)

    def _name_made(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        for name, gradient in _gradients(self._modules, optimizers):
            self.recorder.name(gradient, "gradient", name)
        for name, state in _states(optimizers):
            self.recorder.name(state, "optimizer_state", name)


def counted_device(device: str) -> str:
    """Return the device whose bytes are counted, empty for all."""
    if is_emulated(device):
        return "cuda"
    return device if device.startswith("cuda") else ""


def _open_labels() -> list[str]:
    return [one.name for one in open_ranges()]


def tensors_in(values: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors in nested tuples, lists, mappings and dataclasses."""
    return _tensors_in(values, {})


def _tensors_in(values: Any, seen: dict[int, Any]) -> Iterator[torch.Tensor]:
    if isinstance(values, torch.Tensor):
        yield values
        return
    inner: Iterable[Any]
    if isinstance(values, Mapping):
        inner = values.values()
    elif isinstance(values, (list, tuple)):
        inner = values
    elif hasattr(values, "__dataclass_fields__"):
        inner = [getattr(values, name, None) for name in values.__dataclass_fields__]
    else:
        return
    if id(values) not in seen:
        seen[id(values)] = values
        for value in inner:
            yield from _tensors_in(value, seen)


def tensors_behind(values: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors in values and in the attributes of their objects: those a copy would keep."""
    return _tensors_behind(values, {}, COPIED_DEPTH)


def _tensors_behind(value: Any, seen: dict[int, Any], depth: int) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
        return
    if isinstance(value, SHARED) or callable(value) or id(value) in seen or not depth:
        return
    seen[id(value)] = value
    if isinstance(value, Mapping):
        inner: Iterable[Any] = list(value.values())
    elif isinstance(value, (list, tuple)):
        inner = value
    else:
        inner = list(getattr(value, "__dict__", {}).values())
    for one in inner:
        yield from _tensors_behind(one, seen, depth - 1)


def _gradients(
    modules: Modules, optimizers: Sequence[torch.optim.Optimizer]
) -> Iterator[tuple[str, torch.Tensor]]:
    named = [
        (name, tensor) for kind, name, tensor in modules.named_tensors() if kind == "parameter"
    ]
    for name, parameter in (*_parameters(optimizers), *named):
        if parameter.grad is not None and not isinstance(parameter.grad, Spent):
            yield name, parameter.grad


def _parameters(
    optimizers: Sequence[torch.optim.Optimizer],
) -> Iterator[tuple[str, torch.Tensor]]:
    for optimizer in optimizers:
        for number, parameter in enumerate(parameters_of(optimizer)):
            yield f"{type(optimizer).__name__}.{number}", parameter


def _states(optimizers: Sequence[torch.optim.Optimizer]) -> Iterator[tuple[str, torch.Tensor]]:
    for optimizer in optimizers:
        for number, parameter in enumerate(parameters_of(optimizer)):
            for key, value in optimizer.state.get(parameter, {}).items():
                for tensor in tensors_in(value):
                    yield f"{type(optimizer).__name__}.{number}.{key}", tensor


Device = Literal["cpu", "emulated", "cuda"]
_ONE_AT_A_TIME = threading.RLock()


def record_call(
    function: Callable[[], Any],
    *,
    warmup: int = 0,
    device: Device | None = None,
    project: str | Path | None = None,
) -> Profile:
    """Return the profile of one call, after `warmup` unrecorded calls.

    `project` is the folder of the user's own source, by default the current one. Calls from several threads
    are recorded one at a time.
    """
    chosen = device or ("cuda" if torch.cuda.is_available() and current() is None else "emulated")
    setting = Setting(
        chosen, getattr(function, "__qualname__", "function"), str(project or Path.cwd())
    )
    with _ONE_AT_A_TIME, _emulating(chosen):
        for _ in range(warmup):
            function()
        recording = _Recorded(Modules(), setting)
        recording.begin(())
        try:
            with Watcher(recording, trains=False) as watcher:
                function()
        except BaseException:
            recording.abandon()
            raise
        return recording.end(watcher.optimizers)


class _Recorded(Recording):
    """A recording that registers each root module as it appears."""

    def __init__(self, modules: Modules, setting: Setting) -> None:
        super().__init__(modules, Places(setting.project), setting, allocator_for(setting.device))
        self._roots = modules

    def root_appears(self, root: nn.Module) -> None:
        self._roots.add_root(root)


def _emulating(device: str) -> contextlib.AbstractContextManager[Any]:
    return emulate() if device == "emulated" and current() is None else contextlib.nullcontext()
