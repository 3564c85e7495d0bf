"""What the states of an optimizer take in few bits."""

from __future__ import annotations

LEAST = 4096
"""Elements: torchao, like bitsandbytes, leaves smaller states alone."""
BLOCK = 256
"""Elements that share a scale."""


def narrow_bytes(count: int, wide: int, states: str) -> int:
    """The bytes of a state of so many elements of `wide` bytes each, once it is narrow."""
    if count < LEAST:
        return count * wide
    if states == "bf16":
        return count * min(wide, 2)
    return count + count // BLOCK * 4 if count % BLOCK == 0 else count * wide
