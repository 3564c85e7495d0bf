"""Counts the memory of a model and of one call, on fake tensors."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from torchtrim.capture.modules import without_hooks
from torchtrim.capture.snapshot import Snapshot
from torchtrim.dispatch.storages import Storages, parts_of


class Called(NamedTuple):
    """Bytes that a call's operators allocate: the peak, and the total."""

    most: int
    made: int


class Kept(NamedTuple):
    """Resident bytes of a model, each storage counted once."""

    parameters: int
    buffers: int
    gradients: int


def arguments_of(inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return args and kwargs from a tensor, a tuple or list of arguments, or a dict of named ones."""
    if isinstance(inputs, Mapping):
        return (), dict(inputs)
    return (tuple(inputs), {}) if isinstance(inputs, (tuple, list)) else ((inputs,), {})


def count_kept(model: nn.Module) -> Kept:
    """Count the bytes of parameters, buffers and gradients."""
    seen: set[int] = set()
    parameters = list(model.parameters())
    return Kept(
        _bytes(parameters, seen),
        _bytes(model.buffers(), seen),
        _bytes((p.grad for p in parameters if p.grad is not None), seen),
    )


def _bytes(tensors: Iterable[Tensor], seen: set[int]) -> int:
    total = 0
    for tensor in tensors:
        for part in parts_of(tensor):
            storage = part.untyped_storage()
            if storage._cdata not in seen:
                seen.add(storage._cdata)
                total += storage.nbytes()
    return total


def count_call(model: nn.Module, inputs: Any) -> Called:
    """Count the allocations of one call without gradients. The model is unchanged.

    If fake tensors do not work (data-dependent control flow), the model really runs.
    """
    snapshot = Snapshot([model], (), values=False)
    try:
        with (
            warnings.catch_warnings(),
            _disable_current_modes(),
            torch.no_grad(),
            without_hooks(model),
        ):
            warnings.simplefilter("ignore")
            return _faked(model, inputs)
    except Exception:
        snapshot.restore()
        return _counted(model, *arguments_of(inputs), snapshot=Snapshot([model], ()))
    finally:
        snapshot.restore()


def _faked(model: nn.Module, inputs: Any) -> Called:
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        faked: dict[int, Any] = {}

        def fake(value: Any) -> Any:
            if not isinstance(value, Tensor):
                return value
            if id(value) not in faked:
                faked[id(value)] = mode.from_tensor(value)
            return faked[id(value)]

        named: dict[str, Tensor] = dict(model.named_parameters(remove_duplicate=False))
        named |= dict(model.named_buffers(remove_duplicate=False))
        state = {name: fake(tensor) for name, tensor in named.items()}
        args, kwargs = pytree.tree_map(fake, arguments_of(inputs))

        def call() -> Any:
            return torch.func.functional_call(model, state, args, kwargs)

        return _watched(call, (*state.values(), *pytree.tree_leaves((args, kwargs))))


def _counted(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], snapshot: Snapshot
) -> Called:
    try:
        with torch.no_grad(), without_hooks(model):
            before = [*model.parameters(), *model.buffers(), *pytree.tree_leaves((args, kwargs))]
            return _watched(lambda: model(*args, **kwargs), before)
    finally:
        snapshot.restore()


def _watched(call: Callable[[], Any], before: Iterable[Any]) -> Called:
    counter = Counter(before)
    with counter:
        result = call()
    del result
    return Called(counter.storages.peak_bytes - counter.start, counter.made)


class _Faked(Storages):
    """Storages of fake tensors, which report device `meta`, where storages would have no bytes."""

    def _device(self, device: torch.device) -> str:
        return "cpu" if device.type == "meta" else super()._device(device)


class Counter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A counter of the storages that operators create, apart from those that existed before."""

    def __init__(self, before: Iterable[Any]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.storages = _Faked()
        for tensor in before:
            if isinstance(tensor, Tensor):
                for part in parts_of(tensor):
                    self.storages.see(part, -1)
        self.start = self.storages.live_bytes
        self.storages.note_peak()

    @property
    def rise(self) -> int:
        """Peak rise of storages in bytes."""
        return max(0, self.storages.peak_bytes - self.start)

    @property
    def made(self) -> int:
        """Bytes of all storages created."""
        return sum(life.bytes for life in self.storages.lives if life.birth >= 0)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in pytree.tree_leaves(result):
            if isinstance(tensor, Tensor):
                for part in parts_of(tensor):
                    self.storages.see(part, self.storages.clock)
        self.storages.clock += 1
        self.storages.note_peak()
        return result
