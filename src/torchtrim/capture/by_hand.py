"""Parameters that a script updates by itself, with no optimizer of `torch.optim`."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterable, Iterator

import torch
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes

from torchtrim.capture.allocator import own

_LOOKED_AT = 256
_ELEMENTS = 64


class ByHand:
    """Tells whether parameters have changed since the first backward that it was told of.

    A few elements of each are looked at: an update touches nearly all, and what it leaves out at first
    (rows of an embedding that no batch had) does not matter.
    """

    def __init__(self) -> None:
        self._then: list[tuple[nn.Parameter, bytes]] = []

    def backward_ends(self, roots: Iterable[nn.Module]) -> None:
        """Remember the parameters that have a gradient, if none are remembered."""
        if self._then:
            return
        known = (p for root in roots for p in root.parameters() if _readable(p))
        with _unseen():
            self._then = [(p, _some(p)) for p in itertools.islice(known, _LOOKED_AT)]

    def changed(self) -> bool:
        """Whether any has changed; from then on it awaits the next backward."""
        if not self._then:
            return False
        with _unseen():
            changed = any(_some(now) != then for now, then in self._then)
        if changed:
            self._then = []
        return changed


@contextlib.contextmanager
def _unseen() -> Iterator[None]:
    """Neither recorded nor measured."""
    with torch.no_grad(), _disable_current_modes(), own():
        yield


def _readable(parameter: nn.Parameter) -> bool:
    """Whether it has a gradient, and values to look at."""
    there = parameter.layout is torch.strided and not parameter.is_meta
    return there and parameter.grad is not None


def _some(parameter: nn.Parameter) -> bytes:
    """Some of its elements, spread over it."""
    flat = parameter.detach().reshape(-1)
    some = flat[:: max(1, flat.numel() // _ELEMENTS)].contiguous()
    return bytes(some.view(torch.uint8).tolist())
