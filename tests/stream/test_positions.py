"""Maps made once, tables kept once, results the same, and all of it taken back."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from torchtrim.stream import held_bytes, share_positions


class Sine(nn.Module):
    """Makes a map from a shape, and counts how often."""

    num_position_features, normalize, scale, temperature = 4, True, 1.0, 100
    made = 0

    @staticmethod
    def build_sine_position_embedding(shape: Any) -> torch.Tensor:
        Sine.made += 1
        return torch.arange(float(shape[-1])).sin()

    def forward(self, shape: Any, device: Any, dtype: Any, mask: Any = None) -> torch.Tensor:
        found = self.build_sine_position_embedding(shape)
        return found if mask is None else found * mask


class Attention(nn.Module):
    """Has a rotary table of its own."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.freqs_cis = torch.polar(torch.ones(size), torch.arange(float(size)))


def test_maps_are_made_once_and_tables_kept_once() -> None:
    model = nn.ModuleList([Sine(), Attention(8), Attention(8), Attention(5), Attention(8)])
    before = [one.freqs_cis.clone() for one in model[1:]]
    shared = share_positions(model)
    Sine.made = 0
    maps = [model[0]((1, size), "cpu", torch.float32) for size in (4, 6, 4, 6, 4)]
    assert (Sine.made, shared.hits, shared.misses) == (2, 3, 2)
    assert torch.equal(maps[4], torch.arange(4.0).sin())
    assert shared.bytes == 40
    assert torch.equal(model[0]((1, 4), "cpu", torch.float32, maps[0]), maps[0] * maps[0])
    assert shared.freed_bytes == 2 * 64
    assert held_bytes([one.freqs_cis for one in model[1:]]) == 64 + 40
    shared.revert()
    assert all(torch.equal(a, b.freqs_cis) for a, b in zip(before, model[1:], strict=True))
    assert held_bytes([one.freqs_cis for one in model[1:]]) == 3 * 64 + 40
    assert "forward" not in vars(model[0])


def test_sam2_with_shared_maps_is_the_same() -> None:
    pytest.importorskip("transformers")
    from stream import tiny

    def masks(model: Any) -> list[str]:
        session = tiny.session(model)
        tiny.prompt(session, 0)
        return [tiny.digest(model(session, frame=tiny.image(one)).pred_masks) for one in range(12)]

    model = tiny.tracker()
    expected = masks(model)
    shared = share_positions(model)
    assert masks(model) == expected
    assert shared.misses == 5
    assert shared.hits / (shared.hits + shared.misses) >= 0.9
    shared.revert()
    assert masks(model) == expected
