"""The interface of all paths: attention on lookups, with sums of probabilities by bucket.

Matrix products of tables with queries, keys and gradients happen outside the paths (`ops.py`). A path only
gathers lookups into scores and sums scores into lookups.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from torchtrim.attention.buckets import Maps

WORD = 0xFFFFFFFF  # The lower 32 bits.
# The multipliers of lowbias32, and 2**32 over the golden ratio. Kernels repeat them in 32 bits.
FIRST, SECOND, STRIDE = 0x7FEB352D, 0x846CA68B, 0x9E3779B9


def new_seed(device: torch.device) -> Tensor:
    """Draw a seed from the default generator of the device, (1,) int64."""
    return torch.randint(0, 2**62, (1,), dtype=torch.int64, device=device)


def threshold(p: float) -> int:
    """Return the threshold for random 32-bit words: smaller words are dropped."""
    return min(int(p * 2.0**32), WORD)


def mixed(x: Tensor) -> Tensor:
    """Hash the lower 32 bits of each int64: lowbias32 of Wellons' hash-prospector."""
    x = (x ^ (x >> 16)) * FIRST & WORD
    x = (x ^ (x >> 15)) * SECOND & WORD
    return x ^ (x >> 16)


def kept(seed: Tensor, rows: Tensor, length: int, p: float, dtype: torch.dtype) -> Tensor:
    """Return 0 or 1 / (1 - p) for each of `length` keys of the given rows, (*rows.shape, length).

    It is a function of seed and position, the same on every path. Backward recomputes it,
    without saving an L x L tensor. A row is the index of a query among all heads and samples.
    """
    low, high = seed & WORD, (seed >> 32) & WORD
    start = mixed(mixed((rows & WORD) ^ low) ^ high)
    keys = torch.arange(length, device=rows.device) * STRIDE
    bits = mixed((start[..., None] + keys) & WORD)
    return (bits >= threshold(p)).to(dtype) * (1.0 / (1.0 - p))


class Dropout(NamedTuple):
    """The dropout probability, and the seed, (1,) int64."""

    p: float
    seed: Tensor


class Inputs(NamedTuple):
    """The inputs of a path.

    q, k, v are (N, L, D) with N = samples times heads; lookups (N, L, buckets), of the same type and not to
    be scaled again; mask (B, H, L, L), bool or float, possibly expanded.
    """

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
    """The result of a path.

    `out` is (N, L, D), `lse` the log-sum-exp of the scores (N, L), +inf for a fully masked query, and `sums`
    the probabilities summed by bucket (N, L, buckets), if requested.
    """

    out: Tensor
    lse: Tensor
    sums: Tensor | None


class Gradients(NamedTuple):
    """Gradients of the whole output, including the part of the values' table; `sums` as in `PathResult`."""

    q: Tensor
    k: Tensor
    v: Tensor
    k_lookup: Tensor | None
    q_lookup: Tensor | None
    sums: Tensor | None


class Path(Protocol):
    """One implementation. All agree up to rounding, and each is deterministic."""

    def forward(self, inputs: Inputs, *, with_sums: bool) -> PathResult:
        """Compute the attention."""
        ...

    def backward(
        self, inputs: Inputs, grad: Tensor, lse: Tensor, delta: Tensor, v_lookup: Tensor | None
    ) -> Gradients:
        """Compute the gradients for `grad` (N, L, D).

        `delta` (N, L) is the sum of grad times the whole output, `v_lookup` (N, L, buckets) the product of
        grad and the values' table.
        """
        ...


@lru_cache(maxsize=256)
def blocks(number: int, length: int, dim: int, most: int) -> tuple[tuple[slice, slice], ...]:
    """Split scores into blocks, slices of queries and of heads, of about `most` scores.

    A block has less than half of all scores, or at most as many scores as q has elements.
    """
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
