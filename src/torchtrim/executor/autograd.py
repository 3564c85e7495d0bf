"""Helpers of custom autograd functions: the autocast state of forward, and refusal of double backward."""

from __future__ import annotations

import contextlib
from typing import Any, NamedTuple

import torch


class AutocastState(NamedTuple):
    """The autocast state of one device type."""

    device: str
    dtype: torch.dtype
    enabled: bool

    def again(self) -> contextlib.AbstractContextManager[Any]:
        """Return a context manager that restores the state."""
        return torch.autocast(self.device, dtype=self.dtype, enabled=self.enabled)


def casting(device: str) -> AutocastState:
    """Return the current autocast state."""
    return AutocastState(
        device, torch.get_autocast_dtype(device), torch.is_autocast_enabled(device)
    )


def only_once(name: str) -> None:
    """Raise `RuntimeError` inside a backward that will be differentiated again.

    `torch.autograd.function.once_differentiable` raises only if the incoming gradient requires a gradient.
    Otherwise, as after a sum, a double backward would silently omit a term.
    """
    if torch.is_grad_enabled():
        raise RuntimeError(
            f"{name} cannot be differentiated twice, and a backward with `create_graph=True` reached it. "
            "Remove it from the plan or the program."
        )
