"""Questions about single nodes of a syntax tree, which need no file around them."""

from __future__ import annotations

import ast
from collections.abc import Container, Iterator
from typing import TypeVar

_Node = TypeVar("_Node", bound=ast.AST)
Comprehension = ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp


def name_set(text: str) -> frozenset[str]:
    """Return the words of a text as a set."""
    return frozenset(text.split())


def find_all(node: ast.AST, kind: type[_Node]) -> Iterator[_Node]:
    """Yield the nodes of a type in a piece of code."""
    return (one for one in ast.walk(node) if isinstance(one, kind))


def names_in(node: ast.AST) -> set[str]:
    """Return every name in a piece of code."""
    return {name.id for name in find_all(node, ast.Name)}


def is_stored(node: ast.AST) -> bool:
    """Return True for a name or attribute that is assigned or deleted."""
    return isinstance(node, ast.Name | ast.Attribute) and not isinstance(node.ctx, ast.Load)


def names_bound(node: ast.AST) -> set[str]:
    """Return the names that a piece of code assigns or deletes."""
    return {name.id for name in find_all(node, ast.Name) if is_stored(name)}


def constant_of(node: ast.AST | None) -> object:
    """Return the value of a literal, or None."""
    return node.value if isinstance(node, ast.Constant) else None


def inverted(node: ast.AST) -> ast.expr | None:
    """Return the operand `x` of `~x`, or None for other code."""
    return (
        node.operand if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Invert) else None
    )


def negated(node: ast.AST) -> ast.expr | None:
    """Return the operand `x` of `not x`, or None for other code."""
    return node.operand if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not) else None


def keywords_of(call: ast.Call) -> dict[str | None, ast.expr]:
    """Return the keyword arguments of a call by name, `**kwargs` under None."""
    return {word.arg: word.value for word in call.keywords}


def compares_values(node: ast.Compare) -> bool:
    """Return True for a single comparison of values, not of identity or membership."""
    return len(node.ops) == 1 and not isinstance(
        node.ops[0], ast.In | ast.NotIn | ast.Is | ast.IsNot
    )


def called(function: ast.AST) -> str:
    """Return the last name of a called function, or `""`."""
    if isinstance(function, ast.Attribute):
        return function.attr
    return function.id if isinstance(function, ast.Name) else ""


def method_of(node: ast.AST) -> str:
    """Return the name of the method that an expression calls, or `""`."""
    method = node.func if isinstance(node, ast.Call) else None
    return method.attr if isinstance(method, ast.Attribute) else ""


def receiver(node: ast.AST, methods: Container[str]) -> ast.expr | None:
    """Return the object `x` of a call `x.name(...)` of one of the methods, or None for other code."""
    method = node.func if isinstance(node, ast.Call) else None
    if isinstance(method, ast.Attribute) and method.attr in methods:
        return method.value
    return None


def function_of(node: ast.AST) -> str:
    """Return the plain name that an expression calls, as `len` in `len(x)`, or `""`."""
    return node.func.id if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) else ""
