"""Counts the memory of a model and of one call, on fake tensors."""

from __future__ import annotations

import functools
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
from torchtrim.dispatch.modes import call_operator
from torchtrim.dispatch.storages import Storages, parts_of, storages_in


class CallBytes(NamedTuple):
    """Bytes that a call's operators allocate: the peak, and the total."""

    peak: int
    total: int


class ResidentBytes(NamedTuple):
    """Resident bytes of a model, with each storage counted once."""

    parameters: int
    buffers: int
    gradients: int


def arguments_of(inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return args and kwargs from a tensor, a tuple or list of arguments, or a dict of named ones."""
    if isinstance(inputs, Mapping):
        return (), dict(inputs)
    return (tuple(inputs), {}) if isinstance(inputs, (tuple, list)) else ((inputs,), {})


def count_resident(model: nn.Module) -> ResidentBytes:
    """Count the bytes of parameters, buffers and gradients."""
    seen: set[int] = set()
    parameters = list(model.parameters())
    return ResidentBytes(
        _bytes(parameters, seen),
        _bytes(model.buffers(), seen),
        _bytes((p.grad for p in parameters if p.grad is not None), seen),
    )


def _bytes(tensors: Iterable[Tensor], seen: set[int]) -> int:
    new = {key: one for key, one in storages_in(tensors).items() if key not in seen}
    seen.update(new)
    return sum(storage.nbytes() for storage in new.values())


def count_call(model: nn.Module, inputs: Any) -> CallBytes:
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
        snapshot = Snapshot([model], ())
        args, kwargs = arguments_of(inputs)
        with torch.no_grad(), without_hooks(model):
            before = [*model.parameters(), *model.buffers(), *pytree.tree_leaves((args, kwargs))]
            return _watched(lambda: model(*args, **kwargs), before)
    finally:
        snapshot.restore()


def _faked(model: nn.Module, inputs: Any) -> CallBytes:
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        faked: dict[int, Any] = {}

        def fake(value: Any) -> Any:
            if not isinstance(value, Tensor):
                return value
            if id(value) not in faked:
                faked[id(value)] = mode.from_tensor(value)
            return faked[id(value)]

        parameters = model.named_parameters(remove_duplicate=False)
        named = (*parameters, *model.named_buffers(remove_duplicate=False))
        state = {name: fake(tensor) for name, tensor in named}
        args, kwargs = pytree.tree_map(fake, arguments_of(inputs))
        call = functools.partial(torch.func.functional_call, model, state, args, kwargs)
        return _watched(call, (*state.values(), *pytree.tree_leaves((args, kwargs))))


def _watched(call: Callable[[], Any], before: Iterable[Any]) -> CallBytes:
    with Counter(before) as counter:
        result = call()
    del result
    born = (life.bytes for life in counter.storages.lives if life.birth >= 0)
    return CallBytes(counter.rise, sum(born))


class _Faked(Storages):
    """Storages of fake tensors, counted as on the CPU: storages on device `meta` would have no bytes."""

    def _device(self, device: torch.device) -> str:
        return "cpu" if device.type == "meta" else super()._device(device)


class Counter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A counter of the storages that operators create, apart from those that existed before."""

    def __init__(self, before: Iterable[Any]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.storages = _Faked()
        self._see(before, -1)
        self.start = self.storages.live_bytes
        self.storages.note_peak()

    @property
    def rise(self) -> int:
        """Peak rise of storages in bytes."""
        return max(0, self.storages.peak_bytes - self.start)

    def _see(self, values: Iterable[Any], birth: int) -> None:
        for tensor in values:
            if isinstance(tensor, Tensor):
                for part in parts_of(tensor):
                    self.storages.see(part, birth)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = call_operator(func, args, kwargs or {})
        self._see(pytree.tree_leaves(result), self.storages.clock)
        self.storages.clock += 1
        self.storages.note_peak()
        return result
