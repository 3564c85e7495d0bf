"""Records one step of a watched loop into a profile."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from torchtrim.observe.allocator import Allocator, Watched
from torchtrim.observe.build import Setting, build
from torchtrim.observe.modules import Modules
from torchtrim.observe.places import Places
from torchtrim.observe.recorder import RawCall, Recorder
from torchtrim.observe.watch import Listener
from torchtrim.records.profile import LoaderWait, Phase, Profile


class Recording(Listener):
    """Listens between `begin` and `end`. `allocator`, if given, tells the peak that kernels reach."""

    def __init__(
        self, modules: Modules, places: Places, setting: Setting, allocator: Allocator | None
    ) -> None:
        self.recorder = Recorder(places, mark_operators=allocator is not None)
        self._modules = modules
        self._setting = setting
        self._allocator = allocator
        self.alive_bytes = 0
        self._waits: list[LoaderWait] = []
        self._stack: list[tuple[int, int, tuple[int, ...], bool]] = []
        self._outer: list[Phase] = []
        self.running = False

    def begin(self, optimizers: Sequence[torch.optim.Optimizer], *, scan: bool = True) -> None:
        """Start with what is alive now. `scan`: find it through the garbage collector."""
        gc.collect()
        self.recorder.track(tensor for _, _, tensor in self._modules.named_tensors())
        self.recorder.track(tensor for _, tensor in _states(optimizers))
        self.recorder.track(_gradients(self._modules, optimizers).values())
        if self._allocator is not None:
            self._allocator.start()
        self.recorder.start(scan=scan)
        self._name(optimizers)
        self.running = True

    def abandon(self) -> None:
        """Stop without a profile."""
        if self.running:
            self.running = False
            self.recorder.stop()
            if self._allocator is not None:
                self._allocator.stop()

    def end(self, optimizers: Sequence[torch.optim.Optimizer]) -> Profile:
        """Stop, and make the profile."""
        self.running = False
        self._name(optimizers)
        self.recorder.stop()
        watched = self._allocator.stop() if self._allocator else Watched(0, 0, [], None)
        baseline = sum(life.bytes for life in self.recorder.storages.lives if life.birth < 0)
        self.alive_bytes = baseline + watched.end
        profile = build(self.recorder, self._modules, self._waits, watched, baseline, self._setting)
        self.recorder.storages.forget()
        return profile

    def module_starts(self, module: nn.Module, args: Any, kwargs: Any, depth: int) -> None:
        number = self._modules.number(module)
        recorder = self.recorder
        if depth == 0:
            recorder.phase = "forward"
        inputs = self._storages((args, kwargs)) if depth >= 0 else ()
        self._stack.append((recorder.module, len(recorder.operators), inputs, depth >= 0))
        recorder.module = number if number >= 0 else recorder.module

    def module_ends(self, module: nn.Module, output: Any, depth: int) -> None:
        if not self._stack:
            return
        recorder = self.recorder
        number = self._modules.number(module)
        outer, first, inputs, counts = self._stack.pop()
        recorder.module = outer
        if counts and number >= 0:
            outputs = self._storages(output)
            graded = torch.is_grad_enabled()
            recorder.calls.append(
                RawCall(number, first, len(recorder.operators), depth, inputs, outputs, graded)
            )

    def backward_ends(self) -> None:
        self.recorder.phase = self._outer[-1] if self._outer else "other"

    def optimizer_starts(self, optimizer: torch.optim.Optimizer) -> None:
        self._outer.append("optimizer")
        self.recorder.phase = "optimizer"
        self._name((optimizer,))

    def optimizer_ends(self, optimizer: torch.optim.Optimizer) -> None:
        self._outer.clear()
        self.recorder.phase = "other"
        self._name((optimizer,))

    def loader_waited(self, start_ns: int, end_ns: int, workers: int) -> None:
        start = max(start_ns - self.recorder.start_ns, 0) / 1e9
        self._waits.append(LoaderWait(start, (end_ns - start_ns) / 1e9, workers))

    def _storages(self, values: Any) -> tuple[int, ...]:
        storages = self.recorder.storages
        now = len(self.recorder.operators) - 1
        numbers = [storages.see(tensor, now) for tensor in tensors_in(values)]
        return tuple(dict.fromkeys(number for number in numbers if number >= 0))

    def _name(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        for name, gradient in _gradients(self._modules, optimizers).items():
            self.recorder.name(gradient, "gradient", name)
        for name, state in _states(optimizers):
            self.recorder.name(state, "optimizer_state", name)
        for kind, name, tensor in self._modules.named_tensors():
            self.recorder.name(tensor, kind, name)


def tensors_in(values: Any) -> Iterator[torch.Tensor]:
    """The tensors in nested tuples, lists, mappings and dataclass-like objects of tensors."""
    if isinstance(values, torch.Tensor):
        yield values
    elif isinstance(values, Mapping):
        for value in values.values():
            yield from tensors_in(value)
    elif isinstance(values, (list, tuple)):
        for value in values:
            yield from tensors_in(value)
    elif hasattr(values, "__dataclass_fields__"):
        for name in values.__dataclass_fields__:
            yield from tensors_in(getattr(values, name, None))


def _gradients(
    modules: Modules, optimizers: Sequence[torch.optim.Optimizer]
) -> dict[str, torch.Tensor]:
    named = {
        name: tensor.grad
        for kind, name, tensor in modules.named_tensors()
        if kind == "parameter" and tensor.grad is not None
    }
    if named:
        return named
    return {
        f"parameter {number}": parameter.grad
        for optimizer in optimizers
        for number, parameter in enumerate(parameters_of(optimizer))
        if parameter.grad is not None
    }


def parameters_of(optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    """All parameters of an optimizer's groups, in order."""
    for group in optimizer.param_groups:
        yield from group["params"]


def _states(optimizers: Sequence[torch.optim.Optimizer]) -> Iterator[tuple[str, torch.Tensor]]:
    for optimizer in optimizers:
        for number, parameter in enumerate(parameters_of(optimizer)):
            for key, value in optimizer.state.get(parameter, {}).items():
                for tensor in tensors_in(value):
                    yield f"{type(optimizer).__name__}.{number}.{key}", tensor
