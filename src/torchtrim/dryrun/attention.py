"""Bytes that the CPU's flash attention needs beside its results: a block of scores for each thread.

Source: pytorch/pytorch, aten/src/ATen/native/cpu/FlashAttentionKernel.cpp (v2.13.0): a block is 32 queries,
64 from 192 on, 256 from 768 on, by 512 keys.
"""

from __future__ import annotations

from typing import Any

import torch

_KEYS = 512
_FLOAT = 4


def forward(func: Any, args: Any, kwargs: Any, result: Any) -> int:
    """Workspace of `_scaled_dot_product_flash_attention_for_cpu`."""
    query, key = args[0], args[1]
    rows, columns = _block(query, key)
    each = (rows * columns + 2 * rows + rows * query.shape[-1]) * _FLOAT
    return int(each + _reduced(query, rows * columns)) * torch.get_num_threads()


def backward(func: Any, args: Any, kwargs: Any, result: Any) -> int:
    """Workspace of its backward; the gradient is copied where heads do not lie beside each other."""
    gradient, query, key = args[0], args[1], args[2]
    rows, columns = _block(query, key)
    each = (2 * rows * columns + rows) * _FLOAT
    copied = 0 if gradient.transpose(1, 2).is_contiguous() else gradient.nbytes
    return copied + (each + _reduced(query, 2 * rows * columns)) * torch.get_num_threads()


def _block(query: Any, key: Any) -> tuple[int, int]:
    queries = query.shape[-2]
    rows = 256 if queries >= 768 else 64 if queries >= 192 else 32
    return min(rows, queries), min(_KEYS, key.shape[-2])


def _reduced(query: Any, scores: int) -> int:
    """A copy of the scores in half precision, where the product has it."""
    return scores * query.dtype.itemsize if query.dtype.itemsize < _FLOAT else 0
