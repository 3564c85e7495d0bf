"""Advice measures what it says, on the shape that was asked for."""

from __future__ import annotations

import pytest
import torch

from torchtrim.attention import advice, advise
from torchtrim.errors import UsageError


def changes(**more: object) -> list[str]:
    return [one.change for one in advise(1, 2, 26, head_dim=8, rounds=1, **more)]


def test_every_alternative_has_a_price() -> None:
    found = advise(2, 2, height=6, width=5, skip=1, head_dim=8, rounds=2)
    assert found[0].change == "unchanged"
    assert (found[0].times_faster, found[0].times_fewer_bytes) == (1.0, 1.0)
    assert found[0].equivalence == "ROUNDING"
    assert {one.equivalence for one in found[1:]} == {"SEMANTIC"}
    assert all(one.ms > 0 and one.spread >= 0 and one.saved_bytes > 0 for one in found)
    words = " ".join(one.change for one in found)
    for word in (
        "average",
        "second row",
        "stage",
        "not on v",
        "cross",
        "bias",
        "one table",
        "fewer",
    ):
        assert word in words


def test_what_would_change_nothing_is_left_out() -> None:
    assert "positions on k alone" not in changes(rpe_on="k")
    assert not [one for one in changes(rpe_on="k") if "not on v" in one]
    assert not [one for one in changes(method="cross") if "cross" in one]
    assert not [one for one in changes(shared_head=True) if "one table" in one]
    assert not [one for one in changes(ratio=1.0) if "fewer" in one]
    small = advise(1, 1, 9, head_dim=8, rounds=1)
    assert not [one for one in small if "stage" in one.change or "one table" in one.change]


def test_saved_bytes_are_those_of_the_shape() -> None:
    found = {one.change: one for one in advise(2, 2, 64, head_dim=8, rounds=1, rpe_on="k")}
    whole, halved = found["unchanged"], found["half the resolution in this stage"]
    tokens, out, lse, table = (
        3 * 2 * 2 * 64 * 8 * 4,
        2 * 2 * 64 * 8 * 4,
        2 * 2 * 64 * 4,
        2 * 8 * 49 * 4,
    )
    assert whole.saved_bytes == tokens + out + lse + table
    assert halved.saved_bytes == (tokens + out + lse) // 4 + table
    assert halved.times_fewer_bytes == round(whole.saved_bytes / halved.saved_bytes, 2)


@pytest.mark.parametrize("size", [(4, 6), (5, 7)])
def test_pooling_halves_the_grid_and_repeats_it(size: tuple[int, int]) -> None:
    shape = advice.AttentionShape(1, 1, *size, skip=1, head_dim=2)
    x = torch.randn(1, 1, shape.tokens, 2)
    places = [(y // 2 * 2, z // 2 * 2) for y in range(size[0]) for z in range(size[1])]
    strided = advice._repeated(advice._halved(x, shape, "stride"), shape)
    grid = x[:, :, 1:].unflatten(2, size)
    assert torch.equal(strided[:, :, 0], x[:, :, 0])
    assert torch.equal(strided[0, 0, 1:], torch.stack([grid[0, 0, y, z] for y, z in places]))
    pooled = advice._halved(x, shape, "pool")
    assert torch.allclose(pooled[0, 0, 1], grid[0, 0, :2, :2].mean((0, 1)))


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({}, "Pass either the number of tokens"),
        ({"tokens": 9, "height": 3, "width": 3}, "Pass either the number of tokens"),
        ({"height": 3}, "Pass either the number of tokens"),
        ({"tokens": 0}, "is invalid"),
        ({"tokens": 9, "head_dim": 0}, "is invalid"),
        ({"tokens": 9, "rounds": 0}, "at least one round"),
        ({"tokens": 9, "rpe_on": "x"}, "letters among"),
        ({"tokens": 9, "method": "diagonal"}, "Choose one of"),
    ],
)
def test_what_makes_no_attention_is_refused(arguments: dict[str, object], says: str) -> None:
    with pytest.raises(UsageError, match=says):
        advise(1, 1, **arguments)
