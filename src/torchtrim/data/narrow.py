"""The narrowest types that hold a batch's values exactly."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch.utils._pytree import tree_leaves

_WHOLE = (torch.uint8, torch.int8, torch.int16, torch.int32)
_HALVES = (torch.float16, torch.bfloat16)
_LEVELS = 255
_MOST = 1 << 22


class Narrow(NamedTuple):
    """How the tensors of a batch can be shipped: the bytes as they are and narrowed, and the types."""

    bytes: int
    narrow_bytes: int
    types: tuple[str, ...]


def narrowed(batch: Any) -> Narrow:
    """What the tensors of a batch take, and would take in types that hold the same values."""
    whole = small = 0
    types: list[str] = []
    for tensor in tensors_in(batch):
        size = tensor.numel() * tensor.element_size()
        kind = narrowest(tensor)
        whole += size
        small += tensor.numel() * kind.itemsize
        if kind != tensor.dtype:
            types.append(f"{_name(tensor.dtype)} -> {_name(kind)}")
    return Narrow(whole, small, tuple(dict.fromkeys(types)))


def tensors_in(batch: Any) -> Iterable[torch.Tensor]:
    """The tensors of a batch, of dense memory."""
    return (
        one
        for one in tree_leaves(batch)
        if isinstance(one, torch.Tensor) and one.layout == torch.strided
    )


def narrowest(tensor: torch.Tensor) -> torch.dtype:
    """The narrowest type from which the values come back bit for bit; its own where there is none.

    `uint8` stands for floats too that are whole numbers up to 255, or those divided by 255, as
    `ToTensor` makes them. Judged by the first four million values.
    """
    if not tensor.numel() or tensor.dtype in (torch.bool, torch.uint8, torch.int8):
        return tensor.dtype
    values = tensor.detach().reshape(-1)[:_MOST]
    if tensor.dtype.is_floating_point:
        return _narrowest_float(values)
    if tensor.dtype.is_complex:
        return tensor.dtype
    low, high = int(values.min()), int(values.max())
    for kind in _WHOLE:
        limits = torch.iinfo(kind)
        if limits.min <= low and high <= limits.max and kind.itemsize < tensor.dtype.itemsize:
            return kind
    return tensor.dtype


def levels_of(values: torch.Tensor) -> torch.Tensor | None:
    """The `uint8` of which floats are whole numbers or 255ths, None where they are not."""
    for scale in (1.0, float(_LEVELS)):
        levels = (values.double() * scale).round()
        if bool(((levels >= 0) & (levels <= _LEVELS)).all()):
            small = levels.to(torch.uint8)
            if torch.equal(widened(small, values.dtype, scale), values):
                return small
    return None


def widened(levels: torch.Tensor, kind: torch.dtype, scale: float) -> torch.Tensor:
    """The floats of which `levels` are: as they are, or divided as `ToTensor` divides."""
    wide = levels.to(kind)
    return wide if scale == 1.0 else wide.div(scale)


def _narrowest_float(values: torch.Tensor) -> torch.dtype:
    if levels_of(values) is not None:
        return torch.uint8
    for kind in _HALVES:
        if kind.itemsize < values.dtype.itemsize and torch.equal(
            values.to(kind).to(values.dtype), values
        ):
            return kind
    if values.dtype == torch.float64 and torch.equal(values.float().double(), values):
        return torch.float32
    return values.dtype


def _name(kind: torch.dtype) -> str:
    return str(kind).removeprefix("torch.")
