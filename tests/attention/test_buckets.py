"""Bucket ids equal the published formula bit for bit, and maps stay small and shared."""

import pytest
import torch

import draws
from attention.reference import published_ids, published_index
from torchtrim.attention.buckets import METHODS, Buckets, Coefficients, parsed
from torchtrim.errors import UsageError

RATIOS = (1.9, 2.0, 2.5, 3.0, 20.0, 33.0)
SHAPES = [(n, n) for n in (1, 2, 3, 5, 7, 8, 11, 14, 16, 20)] + [(1, 9), (9, 1), (5, 12), (25, 3)]


def expected(method: str, height: int, width: int, skip: int, ratio: float) -> torch.Tensor:
    ids = published_ids(method, height, width, skip, ratio)
    if method != "cross":
        return ids
    side = 2 * int(2 * ratio) + 1
    flat = ids[0] * side + ids[1]
    return torch.where(ids[0] == side, side * side, flat)


@pytest.mark.parametrize("ratio", RATIOS)
@pytest.mark.parametrize("method", METHODS)
def test_ids_are_the_published(method: str, ratio: float) -> None:
    for height, width in SHAPES:
        for skip in (0, 1, 10):
            found = Buckets.of_ratio(method, height, width, skip=skip, ratio=ratio)
            assert torch.equal(found.ids(), expected(method, height, width, skip, ratio))


@pytest.mark.parametrize("ratio", RATIOS)
@pytest.mark.parametrize("method", METHODS)
def test_maps_of_every_rectangle_are_the_published_formula(method: str, ratio: float) -> None:
    """A pair's bucket depends on its distances alone, so a shape's map is what it says of each."""
    most = int(2 * ratio)
    side = 2 * most + 1
    every = [(height, width) for height in range(1, 43) for width in range(1, 43)]
    edges = every[41::42] + every[-42:]
    for height, width in draws.some(every if ratio == RATIOS[0] else edges):
        found = Buckets.of_ratio(method, height, width, ratio=ratio)
        maps = found.maps()
        ids = maps.pattern[maps.group.long()]
        down = torch.arange(1 - height, height)[:, None].expand_as(ids)
        right = torch.arange(1 - width, width)[None].expand_as(ids)
        if method in ("product", "cross"):
            rows, columns = (published_index(one, ratio) + most for one in (down, right))
            expected = rows * side + columns
        else:
            squares = down.square() + right.square()
            distance = squares if method == "quantization" else squares.float().sqrt().round()
            expected = published_index(distance, ratio) + most
        assert torch.equal(ids.long(), expected), (height, width)
        assert found.number == (side * side if method == "product" else side)


@pytest.mark.parametrize("skip", range(11))
def test_every_skip_and_ratio_on_long_images(skip: int) -> None:
    for ratio in RATIOS:
        for height, width in ((1, 7), (5, 2), (3, 3)):
            for method in METHODS:
                found = Buckets.of_ratio(method, height, width, skip=skip, ratio=ratio)
                assert torch.equal(found.ids(), expected(method, height, width, skip, ratio))


@pytest.mark.parametrize("method", METHODS)
def test_large_and_long_images(method: str) -> None:
    for height, width in ((42, 42), (42, 17), (13, 42)):
        found = Buckets.of_ratio(method, height, width, skip=1)
        assert torch.equal(found.ids(), expected(method, height, width, 1, 1.9))


@pytest.mark.parametrize("skip", range(11))
def test_every_skip(skip: int) -> None:
    for method in METHODS:
        found = Buckets.of_ratio(method, 6, 4, skip=skip)
        assert torch.equal(found.ids(), expected(method, 6, 4, skip, 1.9))


@pytest.mark.parametrize(
    ("method", "number"), [("product", 50), ("cross", 8), ("euclidean", 8), ("quantization", 8)]
)
def test_the_number_of_buckets_counts_the_skip_tokens(method: str, number: int) -> None:
    assert Buckets.of_ratio(method, 7, 9, skip=1).number == number


def test_maps_have_a_few_numbers_per_row_and_column() -> None:
    maps = Buckets.of_ratio("product", 32, 48).maps()
    assert maps.group.numel() == 2 * 32 - 1
    assert maps.pattern.shape == (7, 2 * 48 - 1)


def test_equal_shapes_share_their_maps() -> None:
    first, second = (Buckets.of_ratio("product", 9, 4, skip=1) for _ in range(2))
    assert first == second
    assert first.maps() is second.maps()
    assert parsed(first.key) == first


def test_a_key_keeps_every_digit() -> None:
    found = Buckets("cross", 5, 6, 2, "piecewise", Coefficients(1 / 3, 2 / 3, 7.1))
    assert parsed(found.key) == found


def test_pairs_with_skip_tokens_may_have_buckets_of_their_own() -> None:
    found = Buckets("product", 2, 3, 1, "identity", (), 3)
    ids = found.ids()
    assert found.number == 18
    assert ids[0, 1:].tolist() == [15] * 6
    assert ids[1:, 0].tolist() == [16] * 6
    assert ids[0, 0] == 17


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("diagonal", 3, 3), "Choose one of product"),
        (("product", 0, 3), "is invalid"),
        (("product", 3, 3, -1), "skip at least 0"),
        (("product", 3, 3, 0, "spiral"), "axis 'spiral'"),
        (("euclidean", 3, 3, 0, "clip", (2,)), "one distance across both axes"),
        (("product", 3, 3, 0, "piecewise", (2.0, 1.0, 8.0)), "0 < alpha <= beta"),
        (("product", 3, 3, 0, "clip", ()), "furthest distance"),
        (("product", 3, 3, 0, "identity", (1,)), "no parameters"),
        (("product", 3, 3, 0, "t5", (32, 128, 1)), "height 1"),
        (("product", 1, 3, 0, "t5", (32,)), "bidirectional"),
        (("product", 3, 3, 1, "identity", (), 2), "must be 1 or 3"),
    ],
)
def test_what_has_no_buckets_is_refused(arguments: tuple, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        Buckets(*arguments)
