"""A batch norm that runs again takes the statistics that it found, which are kept for backward anyway.

It then scales and shifts alone. In training its scale is the inverse deviation times the weight; a norm that
does not train computes the same with that as its weight and a deviation of one, in the same kernel, so its
result is the same bit for bit. So it is on a CPU, for dense inputs where all is of one type; any other norm
runs again as it did.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from torchtrim.executor.ordinals import unnumbered
from torchtrim.techniques.replay.norms import TYPES, is_dense
from torchtrim.techniques.replay.recipes import Kept, Step

_STATISTICS, _TRAINS = 3, 5
"""Where `native_batch_norm` has its running statistics, and whether it trains."""
_TYPES = tuple(getattr(torch, name) for name in TYPES)


def without_writes(args: Sequence[Any]) -> tuple[Any, ...]:
    """The arguments with which a batch norm that trains leaves its running statistics alone.

    Where these alone are of another type than the input, the kernel computes in that: it gets others of it.
    """
    if not args[_TRAINS]:
        return tuple(args)
    x, weight, bias, *running = args[:_TRAINS]
    others: list[Any] = [None, None]
    if weight is None and bias is None:
        with unnumbered():
            others = [_another(one, x) for one in running]
    return (*args[:_STATISTICS], *others, *args[_TRAINS:])


def _another(running: torch.Tensor | None, x: torch.Tensor) -> torch.Tensor | None:
    return None if running is None or running.dtype == x.dtype else torch.ones_like(running)


def with_statistics(step: Step, args: Sequence[Any], result: Sequence[torch.Tensor]) -> Step:
    """The step that takes the statistics of the result, where that gives the same; else the step."""
    if not args[_TRAINS] or not _is_plain(args, result[1]):
        return step
    return Step(_normalized, (*step.args[:_STATISTICS], Kept(result[1]), Kept(result[2])), {})


def _is_plain(args: Sequence[Any], mean: torch.Tensor) -> bool:
    """Whether the kernel for dense inputs runs, in one type."""
    x, *channels = (one for one in args[:_TRAINS] if one is not None)
    alike = all(one.is_contiguous() for one in channels) and all(
        one.dtype == x.dtype for one in (*channels, mean)
    )
    dense = is_dense(tuple(x.shape), x.stride())
    return alike and dense and x.dtype in _TYPES and x.device.type == "cpu"


def _normalized(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    mean: torch.Tensor,
    inverse: torch.Tensor,
) -> torch.Tensor:
    scale = inverse if weight is None else inverse * weight
    ones = torch.ones_like(mean)
    norm = torch.ops.aten.native_batch_norm.default
    made: torch.Tensor = norm(x, scale, bias, mean, ones, False, 0.0, 0.0)[0]
    return made
