"""What one distance along an axis is mapped to: functions from query minus key to a bucket."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from torchtrim.errors import UsageError

Parameters = tuple[float, ...]


class Axis(NamedTuple):
    """A function of distances: how many buckets it has for a size, their ids, what it accepts."""

    number: Callable[[int, Parameters], int]
    ids: Callable[[Tensor, Parameters], Tensor]
    check: Callable[[Parameters], None]


def piecewise(distance: Tensor, alpha: float, beta: float, gamma: float) -> Tensor:
    """Equation 18 of the iRPE paper: the distance itself to alpha, its logarithm beyond, int64.

    The bound beta is applied before the fraction goes, as published: 3.8 bounds ids by 3. Rounding
    in float32 decides ids, therefore this uses the operators that the published code uses.
    """
    size = distance.abs()
    far = (alpha + torch.log(size / alpha) / math.log(gamma / alpha) * (beta - alpha)).round()
    beyond = (torch.sign(distance) * far.clip(max=beta)).long()
    return torch.where(size <= alpha, distance.round().long(), beyond)


def _piecewise_number(size: int, parameters: Parameters) -> int:
    return 2 * int(parameters[1]) + 1


def _piecewise_ids(distance: Tensor, parameters: Parameters) -> Tensor:
    alpha, beta, gamma = parameters
    return piecewise(distance, alpha, beta, gamma) + int(beta)


def _piecewise_check(parameters: Parameters) -> None:
    wrong = len(parameters) != 3 or not 0 < parameters[0] <= parameters[1] <= 1e6
    if wrong or not parameters[2] > parameters[0]:
        raise UsageError(
            f"The piecewise function has the coefficients {parameters}. It needs three, with "
            "0 < alpha <= beta and alpha < gamma: Coefficients.of_ratio(1.9) gives the published."
        )


def _clip_number(size: int, parameters: Parameters) -> int:
    return 2 * int(parameters[0]) + 1


def _clip_ids(distance: Tensor, parameters: Parameters) -> Tensor:
    furthest = int(parameters[0])
    return distance.clamp(-furthest, furthest) + furthest


def _clip_check(parameters: Parameters) -> None:
    if len(parameters) != 1 or parameters[0] < 0:
        raise UsageError(f"clip needs one parameter, the furthest distance; {parameters} given.")


def _identity_number(size: int, parameters: Parameters) -> int:
    return 2 * size - 1


def _identity_ids(distance: Tensor, parameters: Parameters) -> Tensor:
    return distance - distance.min() if len(distance) else distance


def _identity_check(parameters: Parameters) -> None:
    if parameters:
        raise UsageError(f"identity has no parameters; {parameters} were given. Pass ().")


def _t5_number(size: int, parameters: Parameters) -> int:
    return int(parameters[0])


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
            f"t5 needs (buckets, furthest distance, bidirectional); {parameters} were given. "
            "Those of T5 are (32, 128, 1) in the encoder and (32, 128, 0) in the decoder."
        )


AXES = {
    "piecewise": Axis(_piecewise_number, _piecewise_ids, _piecewise_check),
    "clip": Axis(_clip_number, _clip_ids, _clip_check),
    "identity": Axis(_identity_number, _identity_ids, _identity_check),
    "t5": Axis(_t5_number, _t5_ids, _t5_check),
}
