"""The path in plain PyTorch: it gathers lookups and scatters sums by row, one block of queries at a time.

`scatter_add_` along the last dimension of a CPU tensor adds in order and never updates a row concurrently, so
it is deterministic. On other devices it uses atomics, and a product with one-hot rows replaces it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from torchtrim.attention.buckets import ids_of
from torchtrim.attention.core import Gradients, Inputs, PathResult, blocks, kept, masked

_CPU_SCORES, _DEVICE_SCORES = 1 << 17, 1 << 24  # 512 KiB of float32 for a cache, 64 MiB for a GPU.


def forward(inputs: Inputs, *, with_sums: bool) -> PathResult:
    """Compute the attention; see `core.Path`."""
    q, v = inputs.q, inputs.v
    out, lse = torch.empty_like(v), q.new_empty(q.shape[:2])
    sums = _zeros(inputs) if with_sums else None
    for rows, heads in _blocks(inputs):
        ids = _BucketIds(inputs, rows)
        scores = _scores(inputs, ids, rows, heads)
        top = scores.amax(-1, keepdim=True).clamp_(min=torch.finfo(q.dtype).min)
        total = scores.sub_(top).exp_().sum(-1, keepdim=True)
        scores /= total.masked_fill(total == 0, 1.0)
        lse[heads, rows] = (top + total.log()).masked_fill(total == 0, float("inf")).squeeze(-1)
        if (keep := _keep(scores, inputs, rows, heads)) is not None:
            scores *= keep
        out[heads, rows] = torch.bmm(scores, v[heads])
        if sums is not None:
            _add_by_bucket(sums[heads, rows], ids.forth, scores)
    return PathResult(out, lse, sums)


def backward(
    inputs: Inputs, grad: Tensor, lse: Tensor, delta: Tensor, v_lookup: Tensor | None
) -> Gradients:
    """Compute the gradients; see `core.Path`."""
    q, k, v, scale = inputs.q, inputs.k, inputs.v, inputs.scale
    result = Gradients(
        torch.empty_like(q),
        torch.zeros_like(k),
        torch.zeros_like(v),
        _zeros(inputs) if inputs.k_lookup is not None else None,
        _zeros(inputs) if inputs.q_lookup is not None else None,
        _zeros(inputs) if v_lookup is not None else None,
    )
    for rows, heads in _blocks(inputs):
        ids = _BucketIds(inputs, rows)
        weights = _scores(inputs, ids, rows, heads).sub_(lse[heads, rows, None]).exp_()
        slopes = torch.bmm(grad[heads, rows], v[heads].transpose(1, 2))
        if v_lookup is not None:
            slopes += _gathered(v_lookup[heads, rows], ids.forth)
        keep = _keep(weights, inputs, rows, heads)
        dropped = weights if keep is None else weights * keep
        if keep is not None:
            slopes *= keep
        slopes.sub_(delta[heads, rows, None]).mul_(weights)
        result.v[heads].baddbmm_(dropped.transpose(1, 2), grad[heads, rows])
        result.q[heads, rows] = torch.bmm(slopes, k[heads]).mul_(scale)
        result.k[heads].baddbmm_(slopes.transpose(1, 2), q[heads, rows], alpha=scale)
        if result.sums is not None:
            _add_by_bucket(result.sums[heads, rows], ids.forth, dropped)
        if result.k_lookup is not None:
            _add_by_bucket(result.k_lookup[heads, rows], ids.forth, slopes)
        if result.q_lookup is not None:
            _add_by_bucket(result.q_lookup[heads], ids.back, slopes.transpose(1, 2))
    return result


class _BucketIds:
    """Buckets of a block of queries: `forth` (rows, L) for query and key, `back` (L, rows) for key and
    query."""

    def __init__(self, inputs: Inputs, rows: slice) -> None:
        tokens = torch.arange(rows.start, rows.stop, device=inputs.q.device)
        self.forth = ids_of(inputs.maps, tokens)
        has_back = inputs.q_lookup is not None
        self.back = ids_of(inputs.maps, tokens, reverse=True).T if has_back else self.forth


def _blocks(inputs: Inputs) -> tuple[tuple[slice, slice], ...]:
    number, length, dim = inputs.q.shape
    most = _CPU_SCORES if inputs.q.device.type == "cpu" else _DEVICE_SCORES
    return blocks(number, length, dim, most)


def _scores(inputs: Inputs, ids: _BucketIds, rows: slice, heads: slice) -> Tensor:
    scores = torch.bmm(inputs.q[heads, rows], inputs.k[heads].transpose(1, 2)).mul_(inputs.scale)
    if inputs.k_lookup is not None:
        scores += _gathered(inputs.k_lookup[heads, rows], ids.forth)
    if inputs.q_lookup is not None:
        scores += _gathered(inputs.q_lookup[heads], ids.back).transpose(1, 2)
    masked(scores, inputs, heads, rows)
    return scores


def _gathered(lookup: Tensor, ids: Tensor) -> Tensor:
    return lookup.gather(-1, ids.expand(len(lookup), *ids.shape))


def _add_by_bucket(sums: Tensor, ids: Tensor, scores: Tensor) -> None:
    if sums.device.type == "cpu":
        sums.scatter_add_(-1, ids.expand(scores.shape), scores)
        return
    buckets = torch.arange(sums.shape[-1], device=sums.device)
    for row in range(ids.shape[0]):
        one_hot = (ids[row][:, None] == buckets).to(scores.dtype)
        sums[:, row] += scores[:, row] @ one_hot


def _keep(scores: Tensor, inputs: Inputs, rows: slice, heads: slice) -> Tensor | None:
    if inputs.dropout is None:
        return None
    number, length = inputs.q.shape[:2]
    places = torch.arange(number * length, device=scores.device).view(number, length)
    p, seed = inputs.dropout
    return kept(seed, places[heads, rows], length, p, scores.dtype)


def _zeros(inputs: Inputs) -> Tensor:
    return inputs.q.new_zeros((*inputs.q.shape[:2], inputs.maps.buckets))
