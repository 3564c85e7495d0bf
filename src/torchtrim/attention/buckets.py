"""Maps pairs of tokens to buckets, with a few numbers per image row and column.

The buckets of images follow Wu et al., "Rethinking and Improving Relative Position Encoding for Vision
Transformer", ICCV 2021, equation 18 and section 3.3. A pair's bucket depends only on the distance of its rows
and the distance of its columns, so an L x L map is not needed.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from torchtrim.errors import UsageError

Parameters = tuple[float, ...]


class Axis(NamedTuple):
    """A function of distances along one axis: its number of buckets, their ids, and a parameter check."""

    number: Callable[[int, Parameters], int]
    ids: Callable[[Tensor, Parameters], Tensor]
    check: Callable[[Parameters], None]


def piecewise(distance: Tensor, alpha: float, beta: float, gamma: float) -> Tensor:
    """Equation 18 of the iRPE paper: the distance up to alpha, its logarithm beyond, as int64.

    As published, the bound beta applies before truncation: 3.8 bounds ids by 3. Ids depend on rounding in
    float32, so this uses the same operators as the published code.
    """
    size = distance.abs()
    far = (alpha + torch.log(size / alpha) / math.log(gamma / alpha) * (beta - alpha)).round()
    beyond = (torch.sign(distance) * far.clip(max=beta)).long()
    return torch.where(size <= alpha, distance.round().long(), beyond)


def _piecewise_ids(distance: Tensor, parameters: Parameters) -> Tensor:
    alpha, beta, gamma = parameters
    return piecewise(distance, alpha, beta, gamma) + int(beta)


def _piecewise_check(parameters: Parameters) -> None:
    wrong = len(parameters) != 3 or not 0 < parameters[0] <= parameters[1] <= 1e6
    if wrong or not parameters[2] > parameters[0]:
        raise UsageError(
            f"The piecewise function got the coefficients {parameters}. It needs three, with "
            "0 < alpha <= beta and alpha < gamma; Coefficients.of_ratio(1.9) returns the published ones."
        )


def _clip_ids(distance: Tensor, parameters: Parameters) -> Tensor:
    furthest = int(parameters[0])
    return distance.clamp(-furthest, furthest) + furthest


def _clip_check(parameters: Parameters) -> None:
    if len(parameters) != 1 or parameters[0] < 0:
        raise UsageError(f"clip needs one parameter, the furthest distance; got {parameters}.")


def _identity_ids(distance: Tensor, parameters: Parameters) -> Tensor:
    return distance - distance.min() if len(distance) else distance


def _identity_check(parameters: Parameters) -> None:
    if parameters:
        raise UsageError(f"identity takes no parameters; got {parameters}. Pass ().")


def _t5_ids(distance: Tensor, parameters: Parameters) -> Tensor:
    number, furthest, bidirectional = int(parameters[0]), int(parameters[1]), bool(parameters[2])
    ahead = -distance
    base = torch.zeros_like(ahead)
    if bidirectional:
        number //= 2
        base = (ahead > 0).long() * number
        ahead = ahead.abs()
    else:
        ahead = -torch.minimum(ahead, torch.zeros_like(ahead))
    exact = number // 2
    far = torch.log(ahead.float() / exact) / math.log(furthest / exact) * (number - exact)
    large = (exact + far.clamp(min=0).long()).clamp(max=number - 1)
    return base + torch.where(ahead < exact, ahead, large)


def _t5_check(parameters: Parameters) -> None:
    if len(parameters) != 3 or parameters[0] < 4 or parameters[1] <= parameters[0] // 2:
        raise UsageError(
            f"t5 needs (buckets, furthest distance, bidirectional); got {parameters}. "
            "T5 uses (32, 128, 1) in the encoder and (32, 128, 0) in the decoder."
        )


AXES = {
    "piecewise": Axis(lambda _, p: 2 * int(p[1]) + 1, _piecewise_ids, _piecewise_check),
    "clip": Axis(lambda _, p: 2 * int(p[0]) + 1, _clip_ids, _clip_check),
    "identity": Axis(lambda size, _: 2 * size - 1, _identity_ids, _identity_check),
    "t5": Axis(lambda _, p: int(p[0]), _t5_ids, _t5_check),
}
METHODS = ("product", "cross", "euclidean", "quantization")


class Coefficients(NamedTuple):
    """Coefficients of the piecewise function: exact up to alpha, then logarithmic up to gamma."""

    alpha: float
    beta: float
    gamma: float

    @classmethod
    def of_ratio(cls, ratio: float) -> Coefficients:
        """Return the published coefficients for a ratio: 1.9 gives 7 x 7 buckets, 2.0 gives 9 x 9."""
        return cls(1 * ratio, 2 * ratio, 8 * ratio)


class Maps(NamedTuple):
    """The buckets of one shape, in the form that paths read.

    `group[yi - yj + height - 1]` is the pattern of a pair of image rows and
    `pattern[group, xi - xj + width - 1]` the bucket of a pair of tokens in them, both int32.
    `extra` has the buckets of pairs with a skip token: as query only, as key only, as both.
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


@dataclass(frozen=True, slots=True)
class Buckets:
    """Buckets for a grid of `height` x `width` tokens after `skip` tokens without a position.

    `method` is one of product, cross, euclidean and quantization. `axis` names the function of a
    distance, with its `parameters`: `piecewise` (alpha, beta, gamma), `clip` (furthest),
    `identity` (none), `t5` (buckets, furthest, bidirectional). `extras` is 1 if all pairs with a skip
    token share a bucket, 3 if skip queries, skip keys and pairs of both have one each. Equal shapes share
    their maps.
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
        """Check the arguments and set the key."""
        object.__setattr__(self, "parameters", tuple(map(float, self.parameters)))
        _check(self)
        words = (self.method, self.height, self.width, self.skip, self.extras, self.axis)
        object.__setattr__(self, "key", " ".join(map(str, (*words, *self.parameters))))

    @classmethod
    def of_ratio(
        cls, method: str, height: int, width: int, *, skip: int = 0, ratio: float = 1.9
    ) -> Buckets:
        """Return the published buckets of a method: alpha = ratio, beta = 2 ratio, gamma = 8 ratio."""
        return cls(method, height, width, skip, "piecewise", Coefficients.of_ratio(ratio))

    @property
    def tokens(self) -> int:
        """The length of the sequence."""
        return self.skip + self.height * self.width

    @property
    def number(self) -> int:
        """The number of buckets, including those of skip tokens; for cross, of each table."""
        return self.rows + self.has_extra if self.method == "cross" else self.composed

    @property
    def composed(self) -> int:
        """The number of buckets of the single table that replaces the two tables of cross."""
        if self.method in ("product", "cross"):
            return self.rows * self.columns + self.has_extra
        return 2 * int(self.parameters[1]) + 1 + self.has_extra

    @property
    def rows(self) -> int:
        """The number of buckets of rows, excluding those of skip tokens; a text has one row."""
        return 1 if self.axis == "t5" else AXES[self.axis].number(self.height, self.parameters)

    @property
    def columns(self) -> int:
        """The number of buckets of columns, excluding those of skip tokens."""
        return AXES[self.axis].number(self.width, self.parameters)

    @property
    def has_extra(self) -> int:
        """The number of buckets of pairs with a skip token: 0, 1 or 3."""
        return self.extras if self.skip else 0

    def maps(self, device: torch.device | None = None) -> Maps:
        """Return the maps of this shape, cached for each device."""
        return maps_of(self.key, device or torch.device("cpu"))

    def ids(self) -> Tensor:
        """Return the bucket of every pair, (L, L) int64, for tests and inspection. No path uses it."""
        return ids_of(self.maps(), torch.arange(self.tokens))


@lru_cache(maxsize=1024)
def parsed(key: str) -> Buckets:
    """Return the buckets of a key."""
    method, height, width, skip, extras, axis, *parameters = key.split()
    numbers = tuple(map(float, parameters))
    return Buckets(method, int(height), int(width), int(skip), axis, numbers, int(extras))


@lru_cache(maxsize=256)
def maps_of(key: str, device: torch.device) -> Maps:
    """Return the maps of a key on a device; callers share them."""
    if device.type != "cpu":
        maps = maps_of(key, torch.device("cpu"))
        return maps._replace(group=maps.group.to(device), pattern=maps.pattern.to(device))
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
    """Return the bucket of each given token as query with every key, (len(tokens), L) int64.

    With `reverse`, the given tokens are the keys, and all tokens are queries.
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
        raise UsageError(f"Unknown method {buckets.method!r}. Choose one of {', '.join(METHODS)}.")
    if buckets.axis not in AXES:
        raise UsageError(f"Unknown axis {buckets.axis!r}. Choose one of {', '.join(AXES)}.")
    if buckets.method in METHODS[2:] and buckets.axis != "piecewise":
        raise UsageError(
            f"The method {buckets.method!r} measures one distance across both axes, which only the "
            f"piecewise function maps; got {buckets.axis!r}. Use product or cross with it."
        )
    if buckets.height < 1 or buckets.width < 1 or buckets.skip < 0:
        raise UsageError(
            f"A grid of {buckets.height} x {buckets.width} after {buckets.skip} skip tokens is invalid. "
            "Height and width must be at least 1, skip at least 0."
        )
    if buckets.extras not in (1, 3) or (buckets.extras == 3 and buckets.method == "cross"):
        raise UsageError(f"extras is {buckets.extras}; it must be 1 or 3, and 1 for cross.")
    if buckets.axis == "t5" and buckets.height > 1:
        raise UsageError(
            f"t5 maps distances in a text, but the grid has {buckets.height} rows. "
            "Pass height 1 and the length as width."
        )
    AXES[buckets.axis].check(buckets.parameters)
