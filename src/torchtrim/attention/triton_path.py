"""The path of GPUs with Triton, and of its interpreter on a CPU."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from torchtrim.attention import triton_kernels as kernels
from torchtrim.attention.buckets import Maps, maps_of
from torchtrim.attention.core import Gradients, Inputs, PathResult
from torchtrim.attention.dropout import threshold

_SMALLEST, _WIDEST = 16, 64


def forward(inputs: Inputs, *, with_sums: bool) -> PathResult:
    """See `core.Path`."""
    q, k, v = inputs.q, inputs.k, inputs.v
    out, lse = torch.empty_like(v), q.new_empty(q.shape[:2], dtype=torch.float32)
    sums = _zeros(inputs) if with_sums else None
    mask, options = _options(inputs)
    given = (q, k, v, *_present(inputs.k_lookup, inputs.q_lookup, like=lse), mask)
    if q.numel():
        kernels.forward[_grid(inputs)](
            *given, _seed(inputs), out, lse, *_present(sums, like=lse), **options, has_v=with_sums
        )
    return PathResult(out, lse, sums)


def backward(
    inputs: Inputs, grad: Tensor, lse: Tensor, delta: Tensor, v_lookup: Tensor | None
) -> Gradients:
    """See `core.Path`."""
    q, k, v = inputs.q, inputs.k, inputs.v
    of_q, of_k, of_v = (torch.empty(x.shape, device=x.device) for x in (q, k, v))
    asked = (inputs.k_lookup, inputs.q_lookup, v_lookup)
    of_k_lookup, of_q_lookup, sums = (_zeros(inputs) if x is not None else None for x in asked)
    mask, options = _options(inputs)
    options["has_v"] = v_lookup is not None
    delta = delta.contiguous()
    given = (q, k, v, *_present(*asked, like=lse), mask, _seed(inputs), grad, lse, delta)
    if q.numel():
        kernels.backward_of_queries[_grid(inputs)](
            *given, of_q, *_present(of_k_lookup, sums, like=lse), **options
        )
        kernels.backward_of_keys[_grid(inputs)](
            *given, of_k, of_v, *_present(of_q_lookup, like=lse), **options
        )
    return Gradients(of_q, of_k, of_v, of_k_lookup, of_q_lookup, sums)


def _grid(inputs: Inputs) -> tuple[int, int]:
    maps = inputs.maps
    rows = maps.height + (maps.skip > 0)
    return rows * _parts(maps), len(inputs.q)


def _size(maps: Maps) -> int:
    return min(_WIDEST, _power(max(maps.width, maps.skip)))


def _parts(maps: Maps) -> int:
    return -(-max(maps.width, maps.skip) // _size(maps))


def _power(number: int) -> int:
    return max(_SMALLEST, 1 << (number - 1).bit_length())


def _options(inputs: Inputs) -> tuple[Tensor, dict[str, Any]]:
    maps, mask = inputs.maps, inputs.mask
    kind = 0 if mask is None else 1 if mask.dtype == torch.bool else 2
    shown = inputs.q.new_zeros(1) if mask is None else mask
    shown = shown.view(torch.uint8) if kind == 1 else shown
    strides = mask.stride() if mask is not None else (0, 0, 0, 0)
    names = ("strides_b", "strides_h", "stride_i", "stride_j")
    p = inputs.dropout.p if inputs.dropout else 0.0
    return shown, {
        **dict(zip(names, strides, strict=True)),
        "group": maps.group,
        "pattern": maps.pattern,
        "windows": _windows(maps.key, inputs.q.device),
        "scale": inputs.scale,
        "below": threshold(p),
        "up": 1.0 / (1.0 - p),
        "heads": 1 if mask is None else mask.shape[1],
        "length": maps.tokens,
        "height": maps.height,
        "width": maps.width,
        "skip": maps.skip,
        "groups": len(maps.pattern),
        "buckets": maps.buckets,
        "rows": maps.height + (maps.skip > 0),
        "parts": _parts(maps),
        "dim": inputs.q.shape[2],
        "v_dim": inputs.v.shape[2],
        "size": _size(maps),
        "dims": _power(inputs.q.shape[2]),
        "v_dims": _power(inputs.v.shape[2]),
        "bins": _power(maps.buckets),
        "has_k": inputs.k_lookup is not None,
        "has_q": inputs.q_lookup is not None,
        "mask_kind": kind,
        "drops": inputs.dropout is not None,
    }


@lru_cache(maxsize=256)
def _windows(key: str, device: torch.device) -> Tensor:
    """The first bucket and the one behind the last, of each pattern and of pairs with skip tokens."""
    maps = maps_of(key, torch.device("cpu"))
    low, high = maps.pattern.amin(1), maps.pattern.amax(1) + 1
    extra = torch.tensor(maps.extra, dtype=torch.int32)
    windows = torch.stack([torch.cat([low, extra]), torch.cat([high, extra + 1])], 1)
    return windows.to(torch.int32).contiguous().to(device)


def _zeros(inputs: Inputs) -> Tensor:
    shape = (*inputs.q.shape[:2], inputs.maps.buckets)
    return torch.zeros(shape, device=inputs.q.device)


def _seed(inputs: Inputs) -> Tensor:
    if inputs.dropout is not None:
        return inputs.dropout.seed
    return torch.zeros(1, dtype=torch.int64, device=inputs.q.device)


def _present(*tensors: Tensor | None, like: Tensor) -> tuple[Tensor, ...]:
    return tuple(like if one is None else one for one in tensors)
