"""Which path computes a call: by device, type and installed packages."""

from __future__ import annotations

from functools import cache
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType

import torch
from torch import Tensor

from torchtrim.errors import UsageError

PATHS = {"pure": "pure", "compiled": "compiled", "triton": "triton_path"}
_NEEDS = {"compiled": "numba", "triton": "triton"}


_INSTALLED = {path: find_spec(needed) is not None for path, needed in _NEEDS.items()}


def available(path: str) -> bool:
    """Whether what the path needs is installed."""
    return _INSTALLED.get(path, True)


def check(name: str) -> None:
    """Refuse a path that does not exist or lacks what it needs."""
    if name not in ("auto", *PATHS):
        raise UsageError(f"There is no path {name!r}. Choose auto, {' or '.join(PATHS)}.")
    if not available(name):
        raise UsageError(
            f"The path {name!r} needs {_NEEDS[name]}, which is not installed. "
            f"Install it, or leave the choice to path='auto'."
        )


def fastest(q: Tensor) -> str:
    """The path for a device and type, among those that are installed."""
    exact = q.dtype != torch.float64
    if q.device.type == "cpu":
        return "compiled" if exact and available("compiled") else "pure"
    return "triton" if q.is_cuda and exact and available("triton") else "pure"


@cache
def module_of(name: str) -> ModuleType:
    """The module of a path."""
    return import_module(f"torchtrim.attention.{PATHS[name]}")
