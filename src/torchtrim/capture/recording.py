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

from torchtrim.capture.allocator import NOTHING, Allocator, Freed, allocator_for
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
    """A running module call: the state to restore after it, its first operator, the storages of its tensor
    arguments, and known storages held by its object arguments."""

    outer: int
    phase: Phase
    first: int
    inputs: tuple[int, ...]
    held: tuple[int, ...]
    depth: int


COPIED_DEPTH = 8
"""Levels of nested arguments that a recomputed block copies. Arbitrary: deep enough for nested outputs."""
SHARED = (nn.Module, type, str, bytes, int, float, complex, type(None), torch.Generator)
"""Types of arguments that a recomputed block shares instead of copying."""


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
        self._before: dict[int, int] = {}
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
        for label in open_ranges():
            self.recorder.open_label(label.name)
        if self._allocator is not None:
            self._allocator.start()
        self.recorder.start(scan=scan)
        if self._allocator is not None and self._allocator.cuts_at_marks:
            self._before = self.recorder.storages.addresses()
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
                self._watched = self._allocator.stop(self.recorder.sums.found, self._freed())

    def _freed(self) -> Iterator[Freed]:
        """Yield the storages from before the step that died in it."""
        for number, address in self._before.items():
            life = self.recorder.storages.lives[number]
            if life.death >= 0 and life.bytes:
                yield Freed(address, life.bytes, self.recorder.mark_of(life.death))

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
        inputs: tuple[int, ...] = ()
        held: tuple[int, ...] = ()
        if depth >= 0:
            inputs, known = self._storages((args, kwargs), "input"), recorder.storages.number
            behind = (known(p) for one in tensors_behind((args, kwargs)) for p in parts_of(one))
            held = tuple(one for one in dict.fromkeys(behind) if one >= 0 and one not in inputs)
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
        elif running.depth >= 0:  # of each call, since the caller may drop a result with its graph
            recorder.saved.read(tensors_in(output))
        if running.depth >= 0 and number >= 0:
            last = len(recorder.operators)
            arguments = running.inputs, self._storages(output, ""), graded, running.held
            recorder.calls.append(Call(number, running.first, last, running.depth, *arguments))

    def backward_starts(self, tensors: tuple[torch.Tensor, ...]) -> None:
        self._phase_starts("backward")

    def backward_ends(self) -> None:
        """Name the gradients, which a program that updates by hand may drop before the step ends."""
        self._phase_ends()
        if not self._phases:
            self._name_gradients(())

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

    def _storages(self, values: Any, kind: str) -> tuple[int, ...]:
        """Return the storages of the tensors in a value; new ones get this `kind`."""
        storages = self.recorder.storages
        now = len(self.recorder.operators) - 1
        parts = (part for tensor in tensors_in(values) for part in parts_of(tensor))
        numbers = dict.fromkeys(storages.see(part, now, kind) for part in parts)
        numbers.pop(-1, None)
        return tuple(numbers)

    def _name(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        """Name all storages. Later names win: a module's parameter gets the module's name."""
        for name, parameter in _parameters(optimizers):
            self.recorder.name(parameter, "parameter", name)
        self._name_made(optimizers)
        for kind, name, tensor in self._modules.named_tensors():
            self.recorder.name(tensor, kind, name)

    def _name_gradients(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        for name, gradient in _gradients(self._modules, optimizers):
            self.recorder.name(gradient, "gradient", name)

    def _name_made(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self._name_gradients(optimizers)
        for name, state in _states(optimizers):
            self.recorder.name(state, "optimizer_state", name)


def counted_device(device: str) -> str:
    """Return the device to count bytes on, empty for all."""
    if is_emulated(device):
        return "cuda"
    return device if device.startswith("cuda") else ""


def tensors_in(values: Any, seen: dict[int, Any] | None = None) -> Iterator[torch.Tensor]:
    """Yield the tensors in nested tuples, lists, mappings and dataclasses. `seen` is for the recursion."""
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
    seen = {} if seen is None else seen
    if id(values) not in seen:
        seen[id(values)] = values
        for value in inner:
            yield from tensors_in(value, seen)


def tensors_behind(
    value: Any, seen: dict[int, Any] | None = None, depth: int = COPIED_DEPTH
) -> Iterator[torch.Tensor]:
    """Yield the tensors in a value and in the attributes of its objects, which a copy would keep alive."""
    if isinstance(value, torch.Tensor):
        yield value
        return
    seen = {} if seen is None else seen
    if isinstance(value, SHARED) or callable(value) or id(value) in seen or not depth:
        return
    seen[id(value)] = value
    if not isinstance(value, (list, tuple)):
        items = value if isinstance(value, Mapping) else getattr(value, "__dict__", {})
        value = list(items.values())
    for inner in value:
        yield from tensors_behind(inner, seen, depth - 1)


def _gradients(
    modules: Modules, optimizers: Sequence[torch.optim.Optimizer]
) -> Iterator[tuple[str, torch.Tensor]]:
    named = [(name, one) for kind, name, one in modules.named_tensors() if kind == "parameter"]
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


class _CallRecording(Recording):
    """A recording that registers each root module as it appears."""

    def root_appears(self, root: nn.Module) -> None:
        self._modules.add_root(root)


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

    `project` is the folder of the user's own source, by default the current one. Threads record one at a
    time.
    """
    chosen = device or ("cuda" if torch.cuda.is_available() and current() is None else "emulated")
    setting = Setting(
        chosen, getattr(function, "__qualname__", "function"), str(project or Path.cwd())
    )
    with contextlib.ExitStack() as stack:
        stack.enter_context(_ONE_AT_A_TIME)
        # Only now, since another thread may have been emulating a device for its recording.
        if chosen == "emulated" and current() is None:
            stack.enter_context(emulate())
        for _ in range(warmup):
            function()
        allocator = allocator_for(setting.device)
        recording = _CallRecording(Modules(), Places(setting.project), setting, allocator)
        recording.begin(())
        try:
            with Watcher(recording, trains=False) as watcher:
                function()
        except BaseException:
            recording.abandon()
            raise
        return recording.end(watcher.optimizers)
