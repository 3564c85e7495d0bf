"""Parameters that a script updates by itself, with no optimizer of `torch.optim`."""

from __future__ import annotations

import itertools
from collections.abc import Iterable

import torch
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes

_LOOKED_AT = 256
_ELEMENTS = 64


class ByHand:
    """Tells whether parameters have changed since the first backward that it was told of.

    A few elements of each are looked at: an update touches nearly all, and what it leaves out at first
    (rows of an embedding that no batch had) does not matter.
    """

    def __init__(self) -> None:
        self._then: list[tuple[torch.Tensor, torch.Tensor]] = []

    def backward_ends(self, roots: Iterable[nn.Module]) -> None:
        """Remember the parameters that have a gradient, if none are remembered."""
        if self._then:
            return
        known = (p for root in roots for p in root.parameters() if p.grad is not None)
        with torch.no_grad(), _disable_current_modes():
            self._then = [(p, _some(p).clone()) for p in itertools.islice(known, _LOOKED_AT)]

    def changed(self) -> bool:
        """Whether any has changed; from then on it waits for the next backward."""
        with torch.no_grad(), _disable_current_modes():
            changed = any(not torch.equal(_some(now), then) for now, then in self._then)
        if changed:
            self._then = []
        return changed


def _some(parameter: torch.Tensor) -> torch.Tensor:
    """Some of its elements, spread over it."""
    flat = parameter.detach()
    if not flat.is_contiguous():
        return flat.reshape(-1)[:_ELEMENTS]
    flat = flat.view(-1)
    return flat[:: max(1, flat.numel() // _ELEMENTS)]
