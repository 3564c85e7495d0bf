"""Other models' positions equal those models' own formulas."""

import math

import pytest
import torch
from torch import Tensor

from torchtrim.attention import (
    autoformer_attention,
    decomposed_attention,
    t5_attention,
    window_bias_attention,
)
from torchtrim.errors import UsageError


def qkv(tokens: int) -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.randn(2, 2, tokens, 8) for _ in range(3)]


@pytest.mark.slow
def test_autoformer() -> None:
    height, width, furthest = 4, 5, 2
    q, k, v = qkv(21)
    tables = [torch.randn(2 * furthest + 2, 8) for _ in range(4)]
    place = torch.arange(height * width)
    ids = []
    for own in (place // width, place % width):
        distance = (own[None] - own[:, None]).clamp(-furthest, furthest) + furthest + 1
        ids.append(torch.nn.functional.pad(distance, (1, 0, 1, 0)))
    on_keys = tables[0][ids[0]] + tables[1][ids[1]]
    on_values = tables[2][ids[0]] + tables[3][ids[1]]
    scores = (q @ k.mT + torch.einsum("bhid,ijd->bhij", q, on_keys)) * 8**-0.5
    weights = scores.softmax(-1)
    expected = weights @ v + torch.einsum("bhij,ijd->bhid", weights, on_values)
    pairs = {"keys": tuple(tables[:2]), "values": tuple(tables[2:])}
    found = autoformer_attention(q, k, v, height=height, width=width, **pairs)
    assert torch.allclose(found, expected, atol=2e-6)
    with pytest.raises(UsageError, match="at least one pair"):
        autoformer_attention(q, k, v, height=height, width=width)


@pytest.mark.parametrize("shape", [(4, 6), (14, 14)])
def test_sam_and_vitdet(shape: tuple[int, int]) -> None:
    height, width = shape
    q, k, v = qkv(height * width)
    tables = torch.randn(2 * height - 1, 8), torch.randn(2 * width - 1, 8)
    grids = []
    for table, size in zip(tables, shape, strict=True):
        own = torch.arange(size)
        grids.append(table[own[:, None] - own[None] + size - 1])
    grid = q.unflatten(2, shape)
    rows = torch.einsum("bnhwc,hkc->bnhwk", grid, grids[0])
    columns = torch.einsum("bnhwc,wkc->bnhwk", grid, grids[1])
    added = (rows[..., :, None] + columns[..., None, :]).flatten(4).flatten(2, 3)
    expected = ((q * 8**-0.5) @ k.mT + added).softmax(-1) @ v
    found = decomposed_attention(q, k, v, *tables, height=height, width=width)
    assert torch.allclose(found, expected, atol=4e-6)
    other = torch.randn(9, 8)
    assert decomposed_attention(q, k, v, other, other, height=height, width=width).isfinite().all()


@pytest.mark.parametrize("more", [0, 3])
def test_swin_and_beit(more: int) -> None:
    height, width = 3, 5
    number = (2 * height - 1) * (2 * width - 1)
    table = torch.randn(number + more, 2)
    own = torch.stack([torch.arange(15) // width, torch.arange(15) % width])
    away = own[:, :, None] - own[:, None, :]
    index = (away[0] + height - 1) * (2 * width - 1) + away[1] + width - 1
    if more:
        padded = index.new_zeros(16, 16)
        padded[1:, 1:] = index
        padded[0, :], padded[:, 0], padded[0, 0] = number, number + 1, number + 2
        index = padded
    q, k, v = qkv(len(index))
    expected = ((q * 8**-0.5) @ k.mT + table[index].permute(2, 0, 1)).softmax(-1) @ v
    found = window_bias_attention(q, k, v, table, height=height, width=width)
    assert torch.allclose(found, expected, atol=2e-6)
    with pytest.raises(UsageError, match="height and width of the window"):
        window_bias_attention(q, k, v, table[:-1], height=height, width=width)


def t5_ids(ahead: Tensor, bidirectional: bool) -> Tensor:
    """T5's buckets for key minus query, in its own words: 32 buckets, to a distance of 128."""
    number = 32 // 2 if bidirectional else 32
    base = (ahead > 0).long() * number * bidirectional
    away = ahead.abs() if bidirectional else (-ahead).clamp(min=0)
    exact = number // 2
    share = torch.log(away.clamp(min=1).float() / exact) / math.log(128 / exact)
    far = exact + (share * (number - exact)).long()
    return base + torch.where(away < exact, away, far.clamp(max=number - 1))


@pytest.mark.parametrize("bidirectional", [True, False])
def test_t5(bidirectional: bool) -> None:
    q, k, v = qkv(150)
    weight = torch.randn(32, 2)
    own = torch.arange(150)
    ids = t5_ids(own[None] - own[:, None], bidirectional)
    expected = (q @ k.mT + weight[ids].permute(2, 0, 1)).softmax(-1) @ v
    found = t5_attention(q, k, v, weight, bidirectional=bidirectional)
    assert torch.allclose(found, expected, atol=4e-6)
