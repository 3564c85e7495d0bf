"""Sizes of optimizer states in few bits."""

from __future__ import annotations

LEAST = 4096  # elements: torchao and bitsandbytes leave smaller states in full precision
BLOCK = 256  # elements that share a scale


def narrow_bytes(count: int, wide: int, states: str) -> int:
    """Return the bytes in few bits of a state with `count` elements of `wide` bytes each."""
    if count < LEAST:
        return count * wide
    if states == "bf16":
        return count * min(wide, 2)
    return count + count // BLOCK * 4 if count % BLOCK == 0 else count * wide
