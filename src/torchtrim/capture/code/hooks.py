"""The hooks of a program on its modules."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn
from torch.nn.modules.module import (
    _global_backward_hooks,
    _global_backward_pre_hooks,
    _global_forward_hooks,
    _global_forward_pre_hooks,
)

FORWARD_HOOKS_ON_ALL = _global_forward_pre_hooks, _global_forward_hooks
"""torch's tables of hooks on the forward of all modules, by the ids of their handles."""


def hook_tables(module: nn.Module) -> tuple[dict[int, Any], ...]:
    """Return the tables of hooks on a module's forward and backward, by the ids of their handles."""
    return (
        module._forward_pre_hooks,
        module._forward_hooks,
        module._backward_pre_hooks,
        module._backward_hooks,
    )


def hooks_of(module: nn.Module) -> Iterator[Any]:
    """Yield the hooks on a module's forward and backward."""
    for table in hook_tables(module):
        yield from table.values()


def forward_hooks_on_all() -> list[Any]:
    """Return the program's hooks on the forward of all modules."""
    return [hook for table in FORWARD_HOOKS_ON_ALL for hook in table.values() if not is_ours(hook)]


def backward_hooks_on_all() -> list[Any]:
    """Return the program's hooks on the backward of all modules."""
    tables = _global_backward_pre_hooks, _global_backward_hooks
    return [hook for table in tables for hook in table.values() if not is_ours(hook)]


def are_all_hooked() -> bool:
    """Return True if the program has hooks on all modules."""
    return bool(forward_hooks_on_all() or backward_hooks_on_all())


def is_ours(hook: Any) -> bool:
    """Return True if a hook is torchtrim's own."""
    return str(getattr(hook, "__module__", "")).startswith("torchtrim.")
