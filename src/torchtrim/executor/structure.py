"""Save the classes, children, hooks and code of modules at a forward, and restore them for its rerun."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from typing import Any

from torch import nn
from torch.nn.modules import module as of_all

from torchtrim.capture.code.hooks import (
    FORWARD_HOOKS_ON_ALL,
    forward_hooks_on_all,
    hook_tables,
    is_ours,
)
from torchtrim.capture.code.side_effects import Reference, changed

_FLAGS_OF_ALL: tuple[MutableMapping[int, Any], ...] = (
    of_all._global_forward_hooks_with_kwargs,
    of_all._global_forward_hooks_always_called,
)
"""How hooks on all modules are called, by the keys of their tables."""


class Structure:
    """Classes, children, hooks and code of modules, as they are now. `references` lead to their code."""

    def __init__(self, modules: Sequence[nn.Module], references: Sequence[Reference]) -> None:
        self._modules = modules
        self._references = references
        self._of_modules = [(type(one), dict(one._modules)) for one in modules]
        self._hooks_on_all = [(table, _programs(table)) for table in FORWARD_HOOKS_ON_ALL]
        self._flags_of_all = [(table, dict(table)) for table in _FLAGS_OF_ALL]
        self._shape = self._now()

    def is_current(self) -> bool:
        """Return True if nothing has changed since."""
        return self._now() == self._shape and not changed(self._references)

    @contextlib.contextmanager
    def again(self) -> Iterator[None]:
        """Restore that structure inside, without the program's hooks on the modules."""
        with contextlib.ExitStack() as stack:
            if not self.is_current():
                self._put_back(stack)
            yield

    def _put_back(self, stack: contextlib.ExitStack) -> None:
        for module, (kind, children) in zip(self._modules, self._of_modules, strict=True):
            if type(module) is not kind:
                stack.callback(setattr, module, "__class__", type(module))
                module.__class__ = kind
            _exchange(stack, module._modules, children)
            for hooks in hook_tables(module):
                _exchange(stack, hooks, _ours(hooks))
        for flags, then in self._flags_of_all:
            _exchange(stack, flags, {**then, **flags})
        for table, then in self._hooks_on_all:
            _exchange(stack, table, {**then, **_ours(table)})
        for one in self._references:
            if (now := one.place.read()) is not one.value:
                stack.callback(one.place.write, now)
                one.place.write(one.value)

    def _now(self) -> list[Any]:
        """Types, children, own methods and hooks, which show whether code may have changed."""
        own = (
            (
                type(module),
                module.__dict__.get("forward"),
                len(module._forward_hooks) + len(module._forward_pre_hooks),
                len(module._backward_hooks) + len(module._backward_pre_hooks),
                *module._modules.values(),
            )
            for module in self._modules
        )
        return [*own, *forward_hooks_on_all()]


def _programs(table: Mapping[int, Any]) -> dict[int, Any]:
    return {key: hook for key, hook in table.items() if not is_ours(hook)}


def _ours(table: Mapping[int, Any]) -> dict[int, Any]:
    return {key: hook for key, hook in table.items() if is_ours(hook)}


def _exchange(
    stack: contextlib.ExitStack, table: MutableMapping[Any, Any], wanted: Mapping[Any, Any]
) -> None:
    """Replace the content of a table until the stack unwinds."""
    now = dict(table)
    if now != wanted:
        stack.callback(_refill, table, now)
        _refill(table, wanted)


def _refill(table: MutableMapping[Any, Any], content: Mapping[Any, Any]) -> None:
    table.clear()
    table.update(content)
