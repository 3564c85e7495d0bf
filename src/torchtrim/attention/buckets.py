"""Which bucket a pair of tokens falls into: maps of a few numbers per image row and column.

The buckets of images are those of Wu et al., "Rethinking and Improving Relative Position Encoding
for Vision Transformer", ICCV 2021, equation 18 and section 3.3. A pair's bucket depends on the
distance of its rows and the distance of its columns alone, so that no map of L x L is needed.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from torchtrim.attention.axes import AXES, piecewise
from torchtrim.errors import UsageError

METHODS = ("product", "cross", "euclidean", "quantization")


class Coefficients(NamedTuple):
    """The coefficients of the piecewise function: exact to alpha, then logarithmic to gamma."""

    alpha: float
    beta: float
    gamma: float

    @classmethod
    def of_ratio(cls, ratio: float) -> Coefficients:
        """The published ones for a ratio: 1.9 gives 7 x 7 buckets, 2.0 gives 9 x 9."""
        return cls(1 * ratio, 2 * ratio, 8 * ratio)


class Maps(NamedTuple):
    """The buckets of one shape, as paths read them.

    `group[yi - yj + height - 1]` is the pattern of a pair of image rows and
    `pattern[group, xi - xj + width - 1]` the bucket of a pair of tokens in them, both int32.
    `extra` has the buckets of pairs that touch a skip token: query only, key only, both.
    """

    key: str
    height: int
    width: int
    skip: int
    group: Tensor
    pattern: Tensor
    extra: tuple[int, int, int]
    buckets: int

    @property
    def tokens(self) -> int:
        """The length of the sequence: skip tokens, then the image row by row."""
        return self.skip + self.height * self.width

    def to(self, device: torch.device) -> Maps:
        """The same maps with tensors on another device."""
        return self._replace(group=self.group.to(device), pattern=self.pattern.to(device))


@dataclass(frozen=True, slots=True)
class Buckets:
    """Buckets for a grid of `height` x `width` tokens behind `skip` tokens without a place.

    `method` is one of product, cross, euclidean and quantization. `axis` names the function of a
    distance and `parameters` are its own: `piecewise` (alpha, beta, gamma), `clip` (furthest),
    `identity` (none), `t5` (buckets, furthest, bidirectional). `extras` is 1 where all pairs with a
    skip token share a bucket, 3 where query, key and both have their own. Equal shapes share maps.
    """

    method: str
    height: int
    width: int
    skip: int = 0
    axis: str = "piecewise"
    parameters: tuple[float, ...] = Coefficients.of_ratio(1.9)
    extras: int = 1
    key: str = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Refuse what has no buckets, and give the whole a name."""
        object.__setattr__(self, "parameters", tuple(map(float, self.parameters)))
        _check(self)
        words = (self.method, self.height, self.width, self.skip, self.extras, self.axis)
        object.__setattr__(self, "key", " ".join(map(str, (*words, *self.parameters))))

    @classmethod
    def of_ratio(
        cls, method: str, height: int, width: int, *, skip: int = 0, ratio: float = 1.9
    ) -> Buckets:
        """The published buckets of a method: alpha = ratio, beta = 2 ratio, gamma = 8 ratio."""
        return cls(method, height, width, skip, "piecewise", Coefficients.of_ratio(ratio))

    @property
    def tokens(self) -> int:
        """The length of the sequence."""
        return self.skip + self.height * self.width

    @property
    def number(self) -> int:
        """How many buckets there are, those of skip tokens included; for cross, of each table."""
        return self.rows + self.has_extra if self.method == "cross" else self.composed

    @property
    def composed(self) -> int:
        """The same, of the one table that a cross method's two are composed to."""
        if self.method in ("product", "cross"):
            return self.rows * self.columns + self.has_extra
        return 2 * int(self.parameters[1]) + 1 + self.has_extra

    @property
    def rows(self) -> int:
        """How many buckets rows have, without those of skip tokens; a text has one row."""
        return 1 if self.axis == "t5" else AXES[self.axis].number(self.height, self.parameters)

    @property
    def columns(self) -> int:
        """How many buckets columns have, without those of skip tokens."""
        return AXES[self.axis].number(self.width, self.parameters)

    @property
    def has_extra(self) -> int:
        """How many buckets pairs with a skip token have: 0, 1 or 3."""
        return self.extras if self.skip else 0

    def maps(self, device: torch.device | None = None) -> Maps:
        """The maps of this shape, made once for each device."""
        return maps_of(self.key, device or torch.device("cpu"))

    def ids(self) -> Tensor:
        """The bucket of every pair, (L, L) int64: for tests and for looking at. No path uses it."""
        return ids_of(self.maps(), torch.arange(self.tokens))


@lru_cache(maxsize=1024)
def parsed(key: str) -> Buckets:
    """The buckets that a key names."""
    method, height, width, skip, extras, axis, *parameters = key.split()
    numbers = tuple(map(float, parameters))
    return Buckets(method, int(height), int(width), int(skip), axis, numbers, int(extras))


@lru_cache(maxsize=256)
def maps_of(key: str, device: torch.device) -> Maps:
    """The maps that a key names on a device, shared by all who ask."""
    if device.type != "cpu":
        return maps_of(key, torch.device("cpu")).to(device)
    buckets = parsed(key)
    with torch.no_grad():
        group, pattern, number = _by_method(buckets)
    extra = (number, number + (buckets.extras == 3), number + (2 if buckets.extras == 3 else 0))
    return Maps(
        key,
        buckets.height,
        buckets.width,
        buckets.skip,
        group.to(torch.int32).contiguous(),
        pattern.to(torch.int32).contiguous(),
        extra,
        number + buckets.has_extra,
    )


def ids_of(maps: Maps, tokens: Tensor, *, reverse: bool = False) -> Tensor:
    """The bucket of each given token as a query with every key, (len(tokens), L) int64.

    With `reverse` the given tokens are the keys, and every token is a query.
    """
    place = (tokens - maps.skip).clamp(min=0)
    sign = -1 if reverse else 1
    down = sign * (
        place.div(maps.width, rounding_mode="floor")[:, None] - _upto(maps.height, place)
    )
    right = sign * ((place % maps.width)[:, None] - _upto(maps.width, place))
    group = maps.group[down + maps.height - 1]
    grid = maps.pattern.long()[group[:, :, None], (right + maps.width - 1)[:, None, :]].flatten(1)
    if not maps.skip:
        return grid
    alone, other, both = maps.extra
    if reverse:
        alone, other = other, alone
    is_skip = (tokens < maps.skip)[:, None]
    first = torch.where(is_skip, both, other).expand(-1, maps.skip)
    return torch.cat([first, torch.where(is_skip, alone, grid)], 1)


def _upto(size: int, like: Tensor) -> Tensor:
    return torch.arange(size, device=like.device)


def _by_method(buckets: Buckets) -> tuple[Tensor, Tensor, int]:
    down = torch.arange(1 - buckets.height, buckets.height)
    right = torch.arange(1 - buckets.width, buckets.width)
    if buckets.method in ("product", "cross"):
        axis = AXES[buckets.axis]
        rows, columns = (axis.ids(d, buckets.parameters) for d in (down, right))
        kinds, group = torch.unique(rows, return_inverse=True)
        pattern = kinds[:, None] * buckets.columns + columns[None, :]
        return group, pattern, buckets.rows * buckets.columns
    squares = down.square()[:, None] + right.square()[None, :]
    euclidean = buckets.method == "euclidean"
    distance = squares.float().sqrt().round() if euclidean else squares
    ids = piecewise(distance, *buckets.parameters) + int(buckets.parameters[1])
    pattern, group = torch.unique(ids, dim=0, return_inverse=True)
    return group, pattern, 2 * int(buckets.parameters[1]) + 1


def _check(buckets: Buckets) -> None:
    if buckets.method not in METHODS:
        raise UsageError(
            f"There are no buckets of the method {buckets.method!r}. "
            f"The methods are {', '.join(METHODS)}; choose one of them."
        )
    if buckets.axis not in AXES:
        raise UsageError(
            f"The axis {buckets.axis!r} is not known. Choose one of {', '.join(AXES)}."
        )
    if buckets.method in METHODS[2:] and buckets.axis != "piecewise":
        raise UsageError(
            f"The method {buckets.method!r} measures one distance of both axes, which only the "
            f"piecewise function maps; {buckets.axis!r} was given. Choose product or cross for it."
        )
    if buckets.height < 1 or buckets.width < 1 or buckets.skip < 0:
        raise UsageError(
            f"A grid of {buckets.height} x {buckets.width} behind {buckets.skip} tokens does not "
            "exist. Height and width are at least 1, skip at least 0."
        )
    if buckets.extras not in (1, 3) or (buckets.extras == 3 and buckets.method == "cross"):
        raise UsageError(f"extras is {buckets.extras}; it must be 1 or 3, and 1 for cross.")
    if buckets.axis == "t5" and buckets.height > 1:
        raise UsageError(
            f"t5 maps distances in a text, and the grid has {buckets.height} rows. "
            "Give it height 1, the length as width."
        )
    AXES[buckets.axis].check(buckets.parameters)
