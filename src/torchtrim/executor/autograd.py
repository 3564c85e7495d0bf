"""Helpers of custom autograd functions: the autocast state of forward, and refusal of double backward."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import torch

from torchtrim.errors import ApplyFailed


def casting(device: str) -> Callable[[], contextlib.AbstractContextManager[Any]]:
    """Return a function that makes contexts with the device's current autocast state."""
    dtype, enabled = torch.get_autocast_dtype(device), torch.is_autocast_enabled(device)
    return functools.partial(torch.autocast, device, dtype=dtype, enabled=enabled)


class NotTwice(ApplyFailed, RuntimeError):
    """A backward of a plan's own function cannot be differentiated again."""


def only_once(name: str) -> None:
    """Raise `NotTwice` inside a backward that will be differentiated again.

    `torch.autograd.function.once_differentiable` raises only if the incoming gradient requires a gradient.
    Otherwise, as after a sum, a double backward would silently omit a term.
    """
    if torch.is_grad_enabled():
        raise NotTwice(
            f"{name} cannot be differentiated twice, and a backward with `create_graph=True` reached it. "
            "Remove it from the plan or the program."
        )
