"""Where a piece of code reads a name, and where it binds one."""

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


def names_in(node: ast.AST) -> set[str]:
    """Every name in a piece of code."""
    return {one.id for one in ast.walk(node) if isinstance(one, ast.Name)}


def binds(inside: ast.AST, expression: ast.expr) -> bool:
    """Whether a piece of code binds or deletes a name of an expression."""
    return any(stores(inside, name) for name in names_in(expression))


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
