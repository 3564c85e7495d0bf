"""What every path computes: attention on lookups, with sums of probabilities by bucket.

Weights of tables meet queries, keys and gradients in plain matrix products outside of the paths
(`tables.py`). A path gathers lookups into scores and sums scores into lookups, nothing else.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from torchtrim.attention.buckets import Maps


class Dropout(NamedTuple):
    """The probability to drop, and the seed, (1,) int64."""

    p: float
    seed: Tensor


class Inputs(NamedTuple):
    """q, k, v (N, L, D) where N counts samples times heads; lookups (N, L, buckets) of the same
    type, without the score's own scale; mask (B, H, L, L), which may be expanded, bool or float."""

    q: Tensor
    k: Tensor
    v: Tensor
    k_lookup: Tensor | None
    q_lookup: Tensor | None
    mask: Tensor | None
    dropout: Dropout | None
    scale: float
    maps: Maps


class PathResult(NamedTuple):
    """out (N, L, D), the logarithm of the sum of exponentials (N, L), +inf where a query sees
    nothing, and the probabilities summed by bucket (N, L, buckets) if they were asked for."""

    out: Tensor
    lse: Tensor
    sums: Tensor | None


class Gradients(NamedTuple):
    """Of the sum of out and of what the values' table adds, with `sums` as in `Outcome`."""

    q: Tensor
    k: Tensor
    v: Tensor
    k_lookup: Tensor | None
    q_lookup: Tensor | None
    sums: Tensor | None


class Path(Protocol):
    """One way to compute it. All are equal up to rounding, and each repeats itself bitwise."""

    def forward(self, inputs: Inputs, *, with_sums: bool) -> PathResult:
        """The attention."""
        ...

    def backward(
        self, inputs: Inputs, grad: Tensor, lse: Tensor, delta: Tensor, v_lookup: Tensor | None
    ) -> Gradients:
        """Gradients for `grad` (N, L, D). `delta` (N, L) is the sum of grad times the whole output
        and `v_lookup` (N, L, buckets) the product of grad and the values' table."""
        ...


@lru_cache(maxsize=256)
def blocks(number: int, length: int, dim: int, most: int) -> tuple[tuple[slice, slice], ...]:
    """Slices of queries, and for each of them slices of heads: about `most` scores, and less than
    half of all of them or no more than queries have numbers."""
    budget = max(length, min(most, max((number * length * length - 1) // 2, number * length * dim)))
    rows = _evenly(length, max(1, min(length, budget // length)))
    heads = _evenly(number, max(1, min(number, budget // (rows * length))))
    return tuple(
        (slice(row, min(length, row + rows)), slice(head, min(number, head + heads)))
        for row in range(0, length, rows)
        for head in range(0, number, heads)
    )


def _evenly(number: int, most: int) -> int:
    return -(-number // -(-number // most)) if number else 1


def masked(scores: Tensor, inputs: Inputs, heads: slice, rows: slice) -> None:
    """Apply the mask to a block of scores in place."""
    mask = inputs.mask
    if mask is None:
        return
    number = torch.arange(inputs.q.shape[0], device=scores.device)[heads]
    part = mask[number // mask.shape[1], number % mask.shape[1], rows]
    if part.dtype == torch.bool:
        scores.masked_fill_(~part, float("-inf"))
    else:
        scores += part
