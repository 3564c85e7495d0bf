"""Bytes that torchtrim's relative-position attention on the CPU needs beside its results.

They follow from `attention.ops` and `attention.compiled`, and were measured for 16 shapes and places of
tables: copies of what does not lie in order, one lookup for each table, tokens column by column where they
are many, and two blocks of scores, which a thread keeps from its first call on.
"""

from __future__ import annotations

import sys
from typing import Any

_SHORT = 100
_SCORES = 2**17
_BLOCKS = 2 * 4 * (_SCORES + 124)
_FLOAT = 4
_TABLES, _BUCKETS = slice(3, 7), 9


def forward(func: Any, args: Any, kwargs: Any, result: Any) -> int:
    """Workspace of `torchtrim::relative_attention`."""
    query = _bytes(args[0])
    turned = 0 if _is_short(args) else 2 + _skips(args)
    return _copies(args) + _lookups(args) + turned * query + _blocks()


def backward(func: Any, args: Any, kwargs: Any, result: Any) -> int:
    """Workspace of `torchtrim::relative_attention_backward`."""
    gradient, call = args[0], args[3:]
    query = _bytes(call[0])
    more = 0 if gradient.is_contiguous() else 1
    if not _is_short(call):
        more += 3 + _skips(call)
        more += 2 if call[0].shape[2] ** 2 > _SCORES else 0
    elif call[3] is not None or call[4] is not None:
        more += 1
    return _copies(call) + 2 * _lookups(call) + more * query + _blocks()


def _bytes(tensor: Any) -> int:
    """Its bytes in single precision, in which all is computed."""
    return int(tensor.numel() * _FLOAT)


def _copies(call: Any) -> int:
    return sum(_bytes(one) for one in call[:3] if not one.is_contiguous() or one.itemsize < _FLOAT)


def _lookups(call: Any) -> int:
    """A number for each query and bucket; the bias and the table of keys share theirs."""
    q_table, k_table, v_table, bias = call[_TABLES]
    of_keys = k_table if k_table is not None else bias
    buckets = [one.shape[-1] for one in (q_table, of_keys) if one is not None]
    buckets += [v_table.shape[-2]] if v_table is not None else []
    samples, heads, length = call[0].shape[:3]
    return int(samples * heads * length * sum(buckets) * _FLOAT)


def _is_short(call: Any) -> bool:
    return bool(call[0].shape[2] <= _SHORT)


def _skips(call: Any) -> bool:
    """Whether tokens come before the grid, which are joined with the transposed ones."""
    from torchtrim.attention.buckets import parsed

    return bool(parsed(call[_BUCKETS]).skip)


def _blocks() -> int:
    """The blocks of scores, unless a call that ran has left them."""
    return 0 if "torchtrim.attention.compiled" in sys.modules else _BLOCKS
