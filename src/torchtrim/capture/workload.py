"""Workloads in Python: a training step and an inference call on a live model."""

from __future__ import annotations

import copy
import inspect
import math
from collections.abc import Callable, Mapping, MutableMapping
from typing import Any, Self

import torch
from torch import nn

from torchtrim.capture.count import arguments_of
from torchtrim.capture.recording import tensors_in
from torchtrim.core.tuples import with_items
from torchtrim.dispatch.storages import storages_in
from torchtrim.dryrun.meta_tensors import blanks
from torchtrim.errors import UsageError

_NUMBERS = 2**22  # largest integer tensor with values in a dry run, as in `dryrun.oracle`
_ON_HOST = ("cpu", "meta")
LossFunction = Callable[[Any, Any], torch.Tensor]


class _Batched:
    """A workload with a batch, and a second one for odd steps, created on first use if not given.

    A created second batch is on the host and moves to the first one's device for its steps. Programs hold
    one batch at a time, so the unused one (`spare`) does not count.
    """

    def __init__(self, batch: Any, second: Any = None) -> None:
        self.batch = batch
        self._second = second
        self._given = second is not None
        self._turn: tuple[int, Any] = (0, batch)
        self._devices: list[torch.device] = []

    def resized(self, dimension: int, length: int, wanted: int) -> Self:
        """Return a copy for dry runs whose tensors of size `length` get size `wanted`: integers repeat,
        others are meta tensors."""
        changed = copy.copy(self)
        changed._second, changed._given = None, False
        changed.batch = _each(self.batch, lambda t: _resized(t, dimension, length, wanted))
        changed._turn = (0, changed.batch)
        return changed

    def replaced_bytes(self, other: _Batched) -> int:
        own = storages_in(tensors_in([self.batch, self._second]))
        others = storages_in(tensors_in([other.batch, other._second]))
        return sum(one.nbytes() for key, one in others.items() if key not in own)

    def prepare(self) -> None:
        """Create the second batch if there is none."""
        if self._second is None:
            self._devices.clear()
            samples = _samples_in(self.batch)

            def rolled_on_host(tensor: torch.Tensor) -> torch.Tensor:
                if _has_samples(tensor) and tensor.shape[0] == samples:
                    tensor = tensor.roll(1, 0)
                self._devices.append(tensor.device)
                return tensor if tensor.device.type in _ON_HOST else tensor.cpu()

            self._second = _each(self.batch, rolled_on_host)

    def turn(self, number: int) -> None:
        if self._turn[0] != number % 2:
            self._turn = (0, self.batch)
            if number % 2:
                self.prepare()
                self._turn = (1, self._second if self._given else self._on_devices())

    def spare(self) -> list[Any]:
        used = storages_in(tensors_in(self._turn[1]))
        found = storages_in(tensors_in([self.batch, self._second]))
        return [storage for key, storage in found.items() if key not in used]

    def _on_devices(self) -> Any:
        if all(device.type in _ON_HOST for device in self._devices):
            return self._second
        devices = iter(self._devices)
        return _each(self._second, lambda tensor: tensor.to(next(devices)))

    def _batch_of(self, number: int, dtype: torch.dtype | None) -> Any:
        self.turn(number)
        batch = self._turn[1]
        if dtype is None:
            return batch
        return _each(batch, lambda t: _in_precision(t, dtype))


class TrainStep(_Batched):
    """One training step: `loss_fn(model, batch)`, backward, `optimizer.step()`, `zero_grad()`.

    `batch` is any nested structure of tensors. The second batch, which certificates need, is `second_batch`
    if given, or `batch` with its samples (the first dimension) rolled by one.
    """

    trains = True

    def __init__(
        self,
        model: nn.Module,
        loss_fn: LossFunction,
        optimizer: torch.optim.Optimizer,
        batch: Any,
        *,
        second_batch: Any = None,
    ) -> None:
        closure = inspect.signature(type(optimizer).step).parameters.get("closure")
        if closure is not None and closure.default is inspect.Parameter.empty:
            raise UsageError(
                f"{type(optimizer).__name__} calls the loss several times in a step, through a closure, "
                "but a TrainStep calls it once. Use the whole script instead: torchtrim.Script."
            )
        self.model = model
        self.optimizers: tuple[torch.optim.Optimizer, ...] = (optimizer,)
        self._loss_fn = loss_fn
        super().__init__(batch, second_batch)

    def step(self, number: int, dtype: torch.dtype | None = None) -> None:
        """Run step `number`: even steps use the batch, odd steps the second one."""
        loss = self._loss_fn(self.model, self._batch_of(number, dtype))
        loss.backward()  # type: ignore[no-untyped-call]
        del loss
        (optimizer,) = self.optimizers
        optimizer.step()
        optimizer.zero_grad()


class Inference(_Batched):
    """One call of a model without gradients. `inputs`: a tensor, a tuple, or a dict of arguments."""

    trains = False

    def __init__(self, model: nn.Module, inputs: Any) -> None:
        self.model = model
        self.optimizers: tuple[torch.optim.Optimizer, ...] = ()
        super().__init__(inputs)

    def step(self, number: int, dtype: torch.dtype | None = None) -> None:
        """Call the model: even numbers use the inputs, odd ones the inputs with samples rolled."""
        args, kwargs = arguments_of(self._batch_of(number, dtype))
        with torch.no_grad():
            self.model(*args, **kwargs)


def batch_of(inputs: Any, size: int) -> Any:
    """Return the inputs with `size` samples and arbitrary values."""
    now = _samples_in(inputs)

    def resize(tensor: torch.Tensor) -> torch.Tensor:
        if not _has_samples(tensor) or tensor.shape[0] != now:
            return tensor
        make = torch.empty if tensor.is_floating_point() or tensor.is_complex() else torch.zeros
        return make((size, *tensor.shape[1:]), dtype=tensor.dtype, device=tensor.device)

    return _each(inputs, resize)


def _resized(tensor: torch.Tensor, dimension: int, length: int, wanted: int) -> torch.Tensor:
    strided = tensor.layout is torch.strided and not tensor.is_nested
    if not strided or tensor.dim() <= dimension or tensor.shape[dimension] != length:
        return tensor
    shape = (*tensor.shape[:dimension], wanted, *tensor.shape[dimension + 1 :])
    if tensor.is_floating_point() or tensor.is_complex() or math.prod(shape) > _NUMBERS:
        strides = torch.empty(shape, device="meta").stride()
        blank: torch.Tensor = blanks().tensor(shape, strides, tensor.dtype)
        return blank.requires_grad_(tensor.requires_grad)
    return tensor.index_select(dimension, torch.arange(wanted, device=tensor.device) % length)


def _samples_in(batch: Any) -> int:
    """Return the number of samples: the most frequent first dimension."""
    sizes = [tensor.shape[0] for tensor in tensors_in(batch) if _has_samples(tensor)]
    return max(set(sizes), key=sizes.count, default=0)


def _has_samples(tensor: torch.Tensor) -> bool:
    return tensor.layout is torch.strided and not tensor.is_nested and tensor.dim() > 0


def _in_precision(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return numbers of a type's precision: complex ones stay complex, integers as they are."""
    if tensor.is_complex():
        return tensor.to(dtype.to_complex())
    return tensor.to(dtype) if tensor.is_floating_point() else tensor


def _each(batch: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    if isinstance(batch, torch.Tensor):
        return change(batch)
    if isinstance(batch, MutableMapping):
        changed = copy.copy(batch)
        changed.update({key: _each(value, change) for key, value in batch.items()})
        return changed
    if isinstance(batch, Mapping):
        return {key: _each(value, change) for key, value in batch.items()}
    if isinstance(batch, tuple):
        return with_items(batch, [_each(value, change) for value in batch])
    if isinstance(batch, list):
        return type(batch)(_each(value, change) for value in batch)
    if hasattr(batch, "__dataclass_fields__") and not isinstance(batch, type):
        changed = copy.copy(batch)
        for name in batch.__dataclass_fields__:
            object.__setattr__(changed, name, _each(getattr(batch, name, None), change))
        return changed
    return batch
