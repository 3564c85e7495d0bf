"""Comparison of the calls of a function and of a reference: results, gradients, writes, random numbers."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch.utils._pytree import tree_leaves, tree_map

from torchtrim.certify.compare import difference, wide
from torchtrim.certify.noise import SEEDS, factor, limit, spread, spreads
from torchtrim.runner.perturbed import Perturbed
from torchtrim.runner.settings import precision

Function = TypeVar("Function", bound=Callable[..., Any])
Values = dict[str, torch.Tensor]


def same_as(
    reference: Callable[..., Any], *, rtol: float | None = None
) -> Callable[[Function], Function]:
    """Return a decorator that compares each call with the reference, on copies of its arguments, first.

    Without `rtol`, differences may be rounding; with it, up to this share of a value's largest number. Raises
    `AssertionError`.
    """

    def decorate(function: Function) -> Function:
        @functools.wraps(function)
        def checked(*args: Any, **kwargs: Any) -> Any:
            _compare(function, reference, (args, kwargs), rtol)
            return function(*args, **kwargs)

        return checked  # type: ignore[return-value]

    return decorate


def _compare(
    function: Callable[..., Any], reference: Callable[..., Any], given: Any, rtol: float | None
) -> None:
    plain, other = _values(reference, given), _values(function, given)
    found = _first(plain, other, dict.fromkeys(plain, rtol or 0.0))
    if found and rtol is None and found[1] != float("inf"):
        plain, other = (_values(one, given, double=True) for one in (reference, function))
        found = _first(plain, other, _bounds(reference, given, plain))
    if found:
        name, gap = found
        raise AssertionError(
            f"{_name(function)} differs from {_name(reference)} in {name}, by {gap:.1e} of its largest: "
            f"more than {'rounding explains' if rtol is None else f'rtol={rtol}'}"
        )


def _first(plain: Values, other: Values, bounds: dict[str, float]) -> tuple[str, float] | None:
    """Return the first value that differs by more than its bound, and its relative difference."""
    for name in [*plain, *(one for one in other if one not in plain)]:
        one, two = plain.get(name), other.get(name)
        gap, scale = difference(*(None if value is None else wide(value) for value in (one, two)))
        share = gap / scale if scale else 0.0
        if one is None or two is None or one.dtype != two.dtype:
            return name, float("inf")
        if share > (bounds.get(name, 0.0) if one.is_floating_point() or one.is_complex() else 0.0):
            return name, share
    return None


def _bounds(reference: Callable[..., Any], given: Any, plain: Values) -> dict[str, float]:
    runs = {seed: _values(reference, given, double=True, seed=seed) for seed in SEEDS}
    most = factor(len(plain), spreads(SEEDS))
    bounds = {}
    for name, value in plain.items():
        pairs = {seed: difference(wide(value), wide(run[name])) for seed, run in runs.items()}
        scale = max(max(scale for _, scale in pairs.values()), torch.finfo(torch.float64).tiny)
        gaps = {seed: gap for seed, (gap, _) in pairs.items()}
        bounds[name] = limit(spread(gaps) / scale, most)
    return bounds


def _values(
    function: Callable[..., Any], given: Any, *, double: bool = False, seed: int = 0
) -> Values:
    """Return what a call computes and writes, and its gradients with fixed weights."""
    own = tree_map(functools.partial(_copied, double=double, seed=seed), given)
    inputs = [one for one in tree_leaves(own) if isinstance(one, torch.Tensor)]
    drawn = torch.get_rng_state()
    try:
        with precision(double=double, nudged=seed):
            results = _tensors(function(*own[0], **own[1]))
        after = torch.get_rng_state()
        wanted = [one for one in inputs if one.requires_grad and one.is_leaf]
        graded = [one for one in results if one.requires_grad]
        loss = sum((wide(one) * _weights(one)).real.sum() for one in graded)
        with precision(double=double, nudged=seed):
            grads = (
                torch.autograd.grad(loss, wanted, allow_unused=True)  # type: ignore[arg-type]
                if graded and wanted
                else ()
            )
    finally:
        torch.set_rng_state(drawn)
    return {
        **{f"result {number}": one.detach() for number, one in enumerate(results)},
        **{f"gradient of input {n}": one for n, one in enumerate(grads) if one is not None},
        **{f"input {number}": one.detach() for number, one in enumerate(inputs)},
        "random numbers drawn": after,
    }


def _copied(value: Any, *, double: bool, seed: int) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    copy = value.detach().clone()
    copy = copy.double() if double and copy.dtype is torch.float32 else copy
    copy = Perturbed(seed).moved(copy) if seed else copy
    return copy.requires_grad_(value.requires_grad)


def _tensors(result: Any) -> list[torch.Tensor]:
    return [
        one
        if isinstance(one, torch.Tensor)
        else torch.tensor(one, dtype=torch.float64, device="cpu")
        for one in tree_leaves(result)
        if isinstance(one, torch.Tensor | bool | int | float)
    ]


def _weights(tensor: torch.Tensor) -> torch.Tensor:
    """Return a weight for each element, so that gradients tell elements apart."""
    count, device = tensor.numel(), tensor.device
    weights = torch.linspace(0.5, 1.5, max(count, 1), dtype=torch.float64, device=device)
    return weights[:count].view(tensor.shape)


def _name(function: Callable[..., Any]) -> str:
    return getattr(function, "__qualname__", type(function).__qualname__)
