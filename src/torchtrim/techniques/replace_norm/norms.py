"""BatchNorms that normalize each sample on its own, or use their running statistics; and both by hand."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.nn.modules.batchnorm import _BatchNorm

from torchtrim.errors import ApplyFailed
from torchtrim.executor.failing import note
from torchtrim.executor.half_precision import ForwardByHand
from torchtrim.executor.registry import Handle, all_or_none
from torchtrim.executor.swap import Swapped, never

Forward = Callable[[torch.Tensor], torch.Tensor]


def replaced(where: str, module: nn.Module, to: str, groups: int) -> Handle:
    """Give every BatchNorm inside such a forward. Raises `ApplyFailed` for one that does not support it."""

    def change(path: str) -> Handle:
        norm = module.get_submodule(path)
        full = f"{where}.{path}".rstrip(".")
        own = _own_norm(full, norm, to, groups)
        swapped = Swapped(norm, lambda _: own, never, lambda one: _own_norm(full, one, to, groups))
        type(norm)._torchtrim_keeps_samples_apart = True  # type: ignore[attr-defined]
        return swapped

    return all_or_none(_paths(where, module), change)


def replaced_by_hand(module: nn.Module, to: str, groups: int) -> Handle:
    """Call another norm with the weights of each BatchNorm."""

    def change(path: str) -> Handle:
        norm = module.get_submodule(path)
        return ForwardByHand(norm, _written(norm, to, groups))

    return all_or_none(_paths("", module), change)


def _paths(where: str, module: nn.Module) -> list[str]:
    found = [path for path, inner in module.named_modules() if isinstance(inner, _BatchNorm)]
    if not found:
        raise ApplyFailed(f"`{where}` has no BatchNorm to replace. Plan again.")
    return found


def groups_of(channels: int, to: str, groups: int) -> int:
    """Return the number of groups that replace the batch."""
    if to == "group":
        return math.gcd(groups, channels)
    return 1 if to == "layer" else channels


def _own_norm(where: str, norm: Any, to: str, groups: int) -> Forward:
    """Return such a forward, which uses the module's contents at the time of the call."""
    if isinstance(norm, nn.SyncBatchNorm) and to != "frozen":
        raise ApplyFailed(
            f"`{where}` is a SyncBatchNorm, which exchanges statistics between processes. Convert it back."
        )
    if to != "frozen":
        return functools.partial(_apart, where, norm, groups_of(norm.num_features, to, groups))
    seen = norm.num_batches_tracked
    if norm.running_mean is None or (seen is not None and not int(seen)):
        raise ApplyFailed(
            f"`{where}` has no running statistics yet, so it would not normalize when frozen. Train it "
            'first, or write `to = "group"`.'
        )
    return functools.partial(_frozen, norm)


def _apart(where: str, norm: Any, groups: int, x: torch.Tensor) -> torch.Tensor:
    if x.dim() < 3 and x.shape[1] == groups:
        error = ApplyFailed(
            f"`{where}` normalizes {tuple(x.shape)}, so each group would be a single number, which "
            'normalizes to zero. Write `to = "layer"`, or fewer `groups`.'
        )
        note(error, where)
        raise error
    return functional.group_norm(x, groups, norm.weight, norm.bias, norm.eps)


def _frozen(norm: Any, x: torch.Tensor) -> torch.Tensor:
    mean, variance = norm.running_mean, norm.running_var
    return functional.batch_norm(
        x, mean, variance, norm.weight, norm.bias, training=False, momentum=0.0, eps=norm.eps
    )


def _written(norm: Any, to: str, groups: int) -> Callable[[Any, torch.Tensor], torch.Tensor]:
    """Return the forward of the module's class as a person would replace it."""
    if to == "frozen":
        return lambda norm, x: functional.batch_norm(
            x, norm.running_mean, norm.running_var, norm.weight, norm.bias, eps=norm.eps
        )
    count = groups_of(norm.num_features, to, groups)
    return lambda norm, x: functional.group_norm(x, count, norm.weight, norm.bias, norm.eps)
