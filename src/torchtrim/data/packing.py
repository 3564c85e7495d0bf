"""The narrowest types that hold a batch's values exactly."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch.utils._pytree import tree_leaves

_WHOLE = (torch.uint8, torch.int8, torch.int16, torch.int32)
_HALVES = (torch.float16, torch.bfloat16)
_LEVELS = 255.0  # The highest uint8: images are scaled by it to 0..1.
_FEW = 4096  # Arbitrary; most tensors that cannot be packed show it in their first values.
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

    `uint8` takes floats too that are whole numbers up to 255, or those divided by 255, as
    `ToTensor` makes them. Judged by the first four million values.
    """
    packed = packed_in(tensor.detach().reshape(-1)[:_MOST])
    return packed.values.dtype if packed is not None else tensor.dtype


class Packed(NamedTuple):
    """Values in a narrower type: those that were of `dtype` are these, divided by `scale` unless it is 1."""

    values: torch.Tensor
    dtype: torch.dtype
    scale: float = 1.0

    def widened(self) -> torch.Tensor:
        """The tensor as it was, bit for bit, on the device where the values are now.

        It divides by a tensor there: by a number, CUDA would multiply by its inverse.
        """
        wide = self.values.to(self.dtype)
        if self.scale == 1.0:
            return wide
        return wide.div_(torch.full((), self.scale, dtype=self.dtype, device=wide.device))


def packed_in(tensor: torch.Tensor) -> Packed | None:
    """The tensor in the narrowest type that gives it back bit for bit; None where no type does."""
    if not tensor.numel() or tensor.dtype == torch.bool or tensor.dtype.is_complex:
        return None
    ways = _float_ways if tensor.dtype.is_floating_point else _whole_ways
    for kind, scale in ways(tensor):
        packed = _if_exact(tensor, kind, scale)
        if packed is not None:
            return packed
    return None


def _float_ways(tensor: torch.Tensor) -> Iterator[tuple[torch.dtype, float]]:
    narrower = (*_HALVES, torch.float32)
    yield torch.uint8, 1.0
    yield torch.uint8, _LEVELS
    yield from ((kind, 1.0) for kind in narrower if kind.itemsize < tensor.dtype.itemsize)


def _whole_ways(tensor: torch.Tensor) -> Iterator[tuple[torch.dtype, float]]:
    low, high = int(tensor.min()), int(tensor.max())
    for kind in _WHOLE:
        limits = torch.iinfo(kind)
        if limits.min <= low and high <= limits.max and kind.itemsize < tensor.dtype.itemsize:
            yield kind, 1.0


def _if_exact(tensor: torch.Tensor, kind: torch.dtype, scale: float) -> Packed | None:
    """Packed so, if all values come back; a few are tried first."""
    if tensor.numel() > _FEW and _if_exact(tensor.reshape(-1)[:_FEW], kind, scale) is None:
        return None
    packed = Packed(_scaled(tensor, kind, scale), tensor.dtype, scale)
    return packed if _same_bits(packed.widened(), tensor) else None


def _scaled(tensor: torch.Tensor, kind: torch.dtype, scale: float) -> torch.Tensor:
    if kind.is_floating_point or not tensor.dtype.is_floating_point:
        return tensor.to(kind)
    return (tensor * scale).round_().clamp_(0, _LEVELS).nan_to_num_().to(kind)


def _same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Equal, and zeros of the same sign."""
    if not torch.equal(one, other):
        return False
    return not one.dtype.is_floating_point or torch.equal(one.signbit(), other.signbit())


def _name(kind: torch.dtype) -> str:
    return str(kind).removeprefix("torch.")
