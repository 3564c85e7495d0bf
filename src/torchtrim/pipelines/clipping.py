"""Gradients clipped by the norm over all ranks of a pipeline, the same bits however many there are."""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

Gather = Callable[[Tensor], None]


def among(group: Any) -> Gather:
    """Adds up, over the ranks of a group, numbers of which each rank has its own, and zeros for the rest."""
    return functools.partial(dist.all_reduce, group=group)


def alone(_: Tensor) -> None:
    """One process has all numbers."""


@contextlib.contextmanager
def clipping_together(gather: Gather) -> Iterator[None]:
    """`torch.nn.utils.clip_grad_norm_` over the parameters of all ranks of a pipeline, while it lasts."""
    original = torch.nn.utils.clip_grad_norm_

    @functools.wraps(original)
    def clip(
        parameters: Any, max_norm: float, norm_type: float = 2.0, *_: Any, **__: Any
    ) -> Tensor:
        several = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        norm = _norm(several, float(norm_type), gather)
        own = [one for one in several if one.grad is not None]
        torch.nn.utils.clip_grads_with_norm_(own, max_norm, norm, foreach=False)
        return norm

    torch.nn.utils.clip_grad_norm_ = clip
    try:
        yield
    finally:
        torch.nn.utils.clip_grad_norm_ = original


def _norm(parameters: Sequence[Tensor], kind: float, gather: Gather) -> Tensor:
    """The norm of all gradients. A rank has those of its own; their sum is exact, in whatever order."""
    powers = torch.zeros(len(parameters), dtype=torch.float64, device="cpu")
    for number, parameter in enumerate(parameters):
        if parameter.grad is not None and parameter.grad.numel():
            sizes = parameter.grad.detach().double().abs()
            powers[number] = sizes.max() if math.isinf(kind) else sizes.pow(kind).sum()
    gather(powers)
    values = powers.tolist()
    norm = max(values, default=0.0) if math.isinf(kind) else math.fsum(values) ** (1 / kind)
    return torch.tensor(norm, dtype=torch.get_default_dtype(), device="cpu")
