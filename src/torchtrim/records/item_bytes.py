"""How large one item of a tensor is, by the name of its type in a profile."""

from __future__ import annotations

_BYTES = {
    "bool": 1,
    "int8": 1,
    "uint8": 1,
    "int16": 2,
    "float16": 2,
    "bfloat16": 2,
    "int64": 8,
    "float64": 8,
    "complex64": 8,
    "complex128": 16,
}


def item_bytes(dtype: str) -> int:
    """Bytes of one item; those of `float32` for a type that is not known."""
    return _BYTES.get(dtype, 4)
