"""Noise of dropout as one bit for each element, and back, exactly."""

from __future__ import annotations

import torch

_NINTHS = -0x7FBFDFEFF7FBFDFF
"""0x8040201008040201 as a signed number. Times eight bytes of 0 or 1, read as one number, it has them in its
highest byte, in reverse; times a byte it has them back, each at the top of a byte of its own."""
_LOWEST = 0x0101010101010101


def packed(noise: torch.Tensor) -> torch.Tensor:
    """Which elements are not zero, in the order of memory. The noise is dense, of a multiple of eight."""
    truth = torch.as_strided(noise, (noise.numel(),), (1,), 0).to(torch.bool, copy=True)
    words = truth.view(torch.int64)
    return words.mul_(_NINTHS).bitwise_right_shift_(56).to(torch.uint8)


def unpacked(bits: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Ones and zeros, in one dimension."""
    words = bits.to(torch.int64)
    words.mul_(_NINTHS).bitwise_right_shift_(7).bitwise_and_(_LOWEST)
    return words.view(torch.uint8).to(dtype)
