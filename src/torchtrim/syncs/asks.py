"""Questions that rows ask about an operator's arguments. Tensors are duck-typed: no torch is imported."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from torchtrim.syncs.base import Ask

_MASK_TYPES = ("torch.bool", "torch.uint8")


def is_tensor(value: Any) -> bool:
    """Whether it is a tensor, by what it can do."""
    return hasattr(value, "dtype") and hasattr(value, "numel")


def on_device(ask: Ask, value: Any) -> bool:
    """Whether it is a tensor on the device."""
    return is_tensor(value) and ask.is_on_device(value)


def on_host(ask: Ask, value: Any) -> bool:
    """Whether it is a tensor in the host's memory."""
    return is_tensor(value) and not ask.is_on_device(value)


def is_mask(tensor: Any) -> bool:
    """Whether a tensor that indexes is a mask, and no list of positions."""
    return str(tensor.dtype) in _MASK_TYPES


def number_on_device(ask: Ask, names: Iterable[str]) -> int:
    """How many of the arguments are tensors on the device."""
    return sum(on_device(ask, ask.args.get(name)) for name in names)


def device(*names: str) -> Callable[[Ask], int]:
    """Waits once where one of the arguments is on the device."""
    return lambda ask: int(number_on_device(ask, names) > 0)


def filled(*names: str) -> Callable[[Ask], int]:
    """As `device`, for operators that do nothing with a tensor without elements."""
    return lambda ask: int(
        any(on_device(ask, ask.args.get(name)) and ask.args[name].numel() for name in names)
    )


def each_device(*names: str) -> Callable[[Ask], int]:
    """Waits for each of the arguments that is on the device."""
    return lambda ask: number_on_device(ask, names)


def no_operator(ask: Ask) -> int:
    """For a call that is no operator, which is never asked about."""
    return 0


def is_dense(tensor: Any) -> bool:
    """Whether a tensor's elements fill its memory without gaps or overlap, in any order of dimensions."""
    if tensor.is_contiguous():
        return True
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1:
            if stride != expected:
                return False
            expected *= size
    return True
