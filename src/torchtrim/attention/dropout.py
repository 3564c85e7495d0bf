"""Which probabilities dropout keeps: a function of seed and place, the same on every path.

Forward and backward compute it again, so that nothing of L x L is kept. The mixing function is
lowbias32 of Wellons' hash-prospector; kernels repeat it in 32 bits.
"""

from __future__ import annotations

import torch
from torch import Tensor

WORD = 0xFFFFFFFF  # The lower 32 bits.
FIRST, SECOND, STRIDE = 0x7FEB352D, 0x846CA68B, 0x9E3779B9


def new_seed(device: torch.device) -> Tensor:
    """A seed from the default generator of the device, (1,) int64."""
    return torch.randint(0, 2**62, (1,), dtype=torch.int64, device=device)


def threshold(p: float) -> int:
    """What is below it is dropped."""
    return min(int(p * 2.0**32), WORD)


def mixed(x: Tensor) -> Tensor:
    """32 well-mixed bits of each of the lower 32 bits of an int64."""
    x = (x ^ (x >> 16)) * FIRST & WORD
    x = (x ^ (x >> 15)) * SECOND & WORD
    return x ^ (x >> 16)


def kept(seed: Tensor, rows: Tensor, length: int, p: float, dtype: torch.dtype) -> Tensor:
    """0 or 1 / (1 - p) for each of `length` keys of the given rows, (*rows.shape, length).

    A row is the number of a query among those of all heads and samples.
    """
    low, high = seed & WORD, (seed >> 32) & WORD
    start = mixed(mixed((rows & WORD) ^ low) ^ high)
    keys = torch.arange(length, device=rows.device) * STRIDE
    bits = mixed((start[..., None] + keys) & WORD)
    return (bits >= threshold(p)).to(dtype) * (1.0 / (1.0 - p))
