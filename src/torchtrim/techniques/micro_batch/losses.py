"""Losses inside a module: a mean over the batch becomes a sum per part over the whole batch's divisor.

The divisor is the number of labels that are not ignored, or the sum of their weights, not the number of
samples.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

from torchtrim.executor.ordinals import unnumbered

_OF_CLASSES = (F.cross_entropy, F.nll_loss)
_BY_ELEMENT = (
    F.mse_loss,
    F.l1_loss,
    F.smooth_l1_loss,
    F.huber_loss,
    F.binary_cross_entropy,
    F.binary_cross_entropy_with_logits,
    F.kl_div,
)
_MEANS = (torch.mean, torch.Tensor.mean)
_SIGNATURES = {func: inspect.signature(func) for func in (*_OF_CLASSES, *_BY_ELEMENT)}


class Losses(TorchFunctionMode):
    """Records the divisor of each mean in `counts`.

    With `split`, the selected means become sums over the part, divided by `totals` once these are known.
    """

    def __init__(
        self, split: Sequence[bool] | None = None, totals: Sequence[torch.Tensor] | None = None
    ) -> None:
        super().__init__()
        self.counts: list[torch.Tensor] = []
        self._split = split
        self._totals = totals

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        found = _mean_of(func, args, kwargs)
        if found is None:
            return func(*args, **kwargs)
        number, (count, summed) = len(self.counts), found
        self.counts.append(count.detach())
        if self._split is None or number >= len(self._split) or not self._split[number]:
            return func(*args, **kwargs)
        total = summed()
        return total if self._totals is None else total / self._totals[number].to(total.dtype)


def _mean_of(func: Any, args: Any, kwargs: Any) -> tuple[torch.Tensor, Any] | None:
    """Return the divisor of a full mean and a function for its sum, or None for other operations."""
    if func in _MEANS:
        alone = len(args) == 1 and not kwargs and args[0].is_floating_point()
        return (_number(args[0], args[0].numel()), args[0].sum) if alone else None
    signature = _SIGNATURES.get(func)
    if signature is None:
        return None
    bound = signature.bind(*args, **kwargs)
    bound.apply_defaults()
    given = bound.arguments
    is_dated = given.get("size_average") is not None or given.get("reduce") is not None
    if given["reduction"] not in ("mean", "batchmean") or is_dated:
        return None
    count = _count_of(func, given)
    if count is None:
        return None
    given["reduction"] = "sum"
    return count, lambda: func(*bound.args, **bound.kwargs)


def _count_of(func: Any, given: dict[str, Any]) -> torch.Tensor | None:
    value, target, weight = given["input"], given["target"], given.get("weight")
    if given["reduction"] == "batchmean":
        return _number(value, value.shape[0])
    if func in _OF_CLASSES:
        return _labels(value, target, weight, given["ignore_index"])
    if weight is not None and func not in _BY_ELEMENT[4:6]:
        return None
    shape = torch.broadcast_shapes(value.shape, target.shape)  # type: ignore[no-untyped-call]
    return _number(value, shape.numel())


@unnumbered()
def _labels(
    value: torch.Tensor, target: torch.Tensor, weight: torch.Tensor | None, ignored: int
) -> torch.Tensor:
    """Return the labels that count with their class weights, or the rows if labels are probabilities."""
    if target.is_floating_point():
        return _number(value, value.numel() // value.shape[min(1, value.dim() - 1)])
    valid = target != ignored
    if weight is None:
        return valid.sum()
    return (weight[target.clamp(min=0)] * valid).sum()


@unnumbered()
def _number(like: torch.Tensor, number: int) -> torch.Tensor:
    return torch.tensor(float(number), dtype=torch.float64, device=like.device)
