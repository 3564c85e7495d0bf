"""Noise as bits and back: whatever its type, its length and its order in memory."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from torchtrim.techniques.replay.recipes import packed, unpacked

TYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16]


def noise_of(seed: int, size: tuple[int, ...], dtype: torch.dtype, share: float) -> torch.Tensor:
    """What dropout draws, before it is scaled."""
    torch.manual_seed(seed)
    return torch.empty(size, dtype=dtype).bernoulli_(share)


@given(
    seed=st.integers(0, 2**31),
    length=st.integers(1, 300),
    dtype=st.sampled_from(TYPES),
    share=st.sampled_from([0.0, 0.1, 0.5, 0.9, 1.0]),
)
def test_there_and_back(seed: int, length: int, dtype: torch.dtype, share: float) -> None:
    noise = noise_of(seed, (8 * length,), dtype, share)
    bits = packed(noise)
    assert bits.untyped_storage().nbytes() == length
    back = unpacked(bits, dtype)
    assert back.dtype is dtype
    assert torch.equal(back, noise)


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_in_the_order_of_memory(dtype: torch.dtype) -> None:
    noise = noise_of(0, (4, 6, 8), dtype, 0.5).permute(2, 0, 1)
    back = unpacked(packed(noise), dtype)
    assert torch.equal(torch.as_strided(back, noise.size(), noise.stride()), noise)


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("share", [0.01, 0.3, 0.5, 0.7, 0.999])
def test_scaled_noise_has_the_bits_of_what_was_drawn(dtype: torch.dtype, share: float) -> None:
    drawn = noise_of(2, (4096,), dtype, share)
    for scaled in (drawn / share, -drawn, drawn * 1e-4):
        assert torch.equal(unpacked(packed(scaled), dtype), drawn)


@pytest.mark.parametrize("dtype", [*TYPES, torch.bool, torch.uint8], ids=str)
def test_nothing_is_changed(dtype: torch.dtype) -> None:
    noise = noise_of(1, (64,), dtype, 0.5)
    before = noise.clone()
    bits = packed(noise)
    kept = bits.clone()
    assert torch.equal(unpacked(bits, dtype), before)
    assert torch.equal(noise, before)
    assert torch.equal(bits, kept)
