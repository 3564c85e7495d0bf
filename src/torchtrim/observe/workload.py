"""Workloads in Python: a training step and an inference call on a live model."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Mapping, MutableMapping
from typing import Any

import torch
from torch import nn

from torchtrim.errors import UsageError
from torchtrim.observe.recording import tensors_in

LossFunction = Callable[[Any, Any], torch.Tensor]


class TrainStep:
    """One training step: `loss_fn(model, batch)`, backward, `optimizer.step()`, `zero_grad()`.

    `batch` is any nest of tensors. A second batch, which the verifier wants, is `batch` with its
    samples (the first dimension) rolled by one, or `second_batch` if given.
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
                "and a TrainStep calls it once. Hand the script over instead: torchtrim.Script."
            )
        self.model = model
        self.optimizers: tuple[torch.optim.Optimizer, ...] = (optimizer,)
        self._loss_fn = loss_fn
        self._batches = (batch, _rolled(batch) if second_batch is None else second_batch)

    def step(self, number: int, dtype: torch.dtype | None = None) -> None:
        """Run step `number`; even ones take the batch, odd ones the second."""
        batch = _cast(self._batches[number % 2], dtype)
        loss = self._loss_fn(self.model, batch)
        loss.backward()  # type: ignore[no-untyped-call]
        del loss
        (optimizer,) = self.optimizers
        optimizer.step()
        optimizer.zero_grad()


class Inference:
    """One call of a model without gradients. `inputs`: a tensor, a tuple, or a dict of arguments."""

    trains = False

    def __init__(self, model: nn.Module, inputs: Any) -> None:
        self.model = model
        self.optimizers: tuple[torch.optim.Optimizer, ...] = ()
        self._batches = (inputs, _rolled(inputs))

    def step(self, number: int, dtype: torch.dtype | None = None) -> None:
        """Call the model; even numbers take the inputs, odd ones the same with samples rolled."""
        inputs = _cast(self._batches[number % 2], dtype)
        with torch.no_grad():
            if isinstance(inputs, Mapping):
                self.model(**inputs)
            elif isinstance(inputs, (tuple, list)):
                self.model(*inputs)
            else:
                self.model(inputs)


def _rolled(batch: Any) -> Any:
    """The batch with its samples in another order: every tensor of the batch's length rolled by one."""
    sizes = [tensor.shape[0] for tensor in tensors_in(batch) if _has_samples(tensor)]
    size = max(set(sizes), key=sizes.count, default=0)
    return _each(batch, lambda t: t.roll(1, 0) if _has_samples(t) and t.shape[0] == size else t)


def _has_samples(tensor: torch.Tensor) -> bool:
    return tensor.layout is torch.strided and not tensor.is_nested and tensor.dim() > 0


def _cast(batch: Any, dtype: torch.dtype | None) -> Any:
    if dtype is None:
        return batch
    return _each(batch, lambda t: t.to(dtype) if t.is_floating_point() else t)


def _each(batch: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    if isinstance(batch, torch.Tensor):
        return change(batch)
    if isinstance(batch, MutableMapping):
        changed = copy.copy(batch)
        changed.update({key: _each(value, change) for key, value in batch.items()})
        return changed
    if isinstance(batch, Mapping):
        return {key: _each(value, change) for key, value in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(_each(value, change) for value in batch))
    if isinstance(batch, (list, tuple)):
        return type(batch)(_each(value, change) for value in batch)
    if hasattr(batch, "__dataclass_fields__") and not isinstance(batch, type):
        changed = copy.copy(batch)
        for name in batch.__dataclass_fields__:
            object.__setattr__(changed, name, _each(getattr(batch, name, None), change))
        return changed
    return batch
