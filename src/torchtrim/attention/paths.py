"""Which path computes a call: by device, type and what is installed."""

from __future__ import annotations

from functools import cache
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType

import torch

from torchtrim.attention.core import Inputs
from torchtrim.errors import UsageError

PATHS = {"pure": "pure", "compiled": "compiled", "triton": "triton_path"}
_NEEDS = {"compiled": "numba", "triton": "triton"}


@cache
def available(path: str) -> bool:
    """Whether what the path needs is installed."""
    return path not in _NEEDS or find_spec(_NEEDS[path]) is not None


def path_for(name: str, inputs: Inputs) -> ModuleType:
    """The module of a path: the one that is named, or for `auto` the fastest that can."""
    return _module(_fastest(inputs) if name == "auto" else name)


def check(name: str) -> None:
    """Refuse a path that does not exist or lacks what it needs."""
    if name not in ("auto", *PATHS):
        raise UsageError(f"There is no path {name!r}. Choose auto, {' or '.join(PATHS)}.")
    if not available(name):
        raise UsageError(
            f"The path {name!r} needs {_NEEDS[name]}, which is not installed. "
            f"Install it, or leave the choice to path='auto'."
        )


def _fastest(inputs: Inputs) -> str:
    fits = inputs.q.dtype == torch.float32
    if inputs.q.device.type == "cpu":
        return "compiled" if fits and available("compiled") else "pure"
    if inputs.q.device.type == "cuda":
        return "triton" if fits and available("triton") else "pure"
    return "pure"


@cache
def _module(name: str) -> ModuleType:
    return import_module(f"torchtrim.attention.{PATHS[name]}")
