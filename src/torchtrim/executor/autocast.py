"""Autocast as it was in forward, for what runs again in backward."""

from __future__ import annotations

import contextlib
from typing import Any, NamedTuple

import torch


class Casting(NamedTuple):
    """The state of autocast on one kind of device."""

    device: str
    dtype: torch.dtype
    enabled: bool

    def again(self) -> contextlib.AbstractContextManager[Any]:
        """The state, once more."""
        return torch.autocast(self.device, dtype=self.dtype, enabled=self.enabled)


def casting(device: str) -> Casting:
    """The state that is on now."""
    return Casting(device, torch.get_autocast_dtype(device), torch.is_autocast_enabled(device))
