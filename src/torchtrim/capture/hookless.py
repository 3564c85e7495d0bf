"""Runs modules without their hooks, where what runs is not the user's own call."""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from collections.abc import Iterator

from torch import nn

HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


@contextlib.contextmanager
def without_hooks(module: nn.Module) -> Iterator[None]:
    """The module and all inside have no hooks, then the same ones again."""
    kept = [
        (inner, name, vars(inner)[name])
        for inner in module.modules()
        for name in HOOKS
        if vars(inner).get(name)
    ]
    try:
        for inner, name, _ in kept:
            vars(inner)[name] = OrderedDict()
        yield
    finally:
        for inner, name, hooks in kept:
            vars(inner)[name] = hooks
