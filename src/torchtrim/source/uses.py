"""Where a function's code reads a name, and where it binds one."""

from __future__ import annotations

import ast
import weakref
from collections.abc import Sequence

_Places = tuple[list[ast.Name], list[ast.Name]]
_KNOWN: weakref.WeakKeyDictionary[ast.AST, dict[str, _Places]] = weakref.WeakKeyDictionary()


def loads(function: ast.AST, name: str) -> Sequence[ast.Name]:
    """Each place of a function's code, nested functions included, that reads a name."""
    return _places(function, name)[0]


def stores(function: ast.AST, name: str) -> Sequence[ast.Name]:
    """Each place of a function's code that binds or deletes a name."""
    return _places(function, name)[1]


def _places(function: ast.AST, name: str) -> _Places:
    """A function is walked once: trees are never changed."""
    known = _KNOWN.get(function)
    if known is None:
        known = _KNOWN[function] = {}
        for node in ast.walk(function):
            if isinstance(node, ast.Name):
                found = known.setdefault(node.id, ([], []))
                found[not isinstance(node.ctx, ast.Load)].append(node)
    return known.get(name, ([], []))
