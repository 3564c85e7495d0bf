"""What a loop may do to a tensor that it only reads in one place."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from torchtrim.source.names import literal_stores, only_reads, was_fresh
from torchtrim.source.purity import is_pure
from torchtrim.source.source import Loop, Source
from torchtrim.source.uses import loads

_HARMLESS_METHODS_NAMES = """
    append extend insert items keys values get join format split strip startswith endswith lower
    upper replace count index
"""
_HARMLESS_METHODS = frozenset(_HARMLESS_METHODS_NAMES.split())
_HARMLESS = frozenset(["print", "sorted", "repr", "id", "type", "slice", "iter"])


def loops_around(source: Source, node: ast.AST) -> Iterator[Loop]:
    """The loops of the same function around a node, innermost first."""
    at = source.loop(node)
    while at is not None:
        yield at
        at = source.loop(at)


def changes_nothing(source: Source, inside: ast.AST) -> bool:
    """Whether no tensor is written to there, as far as its form tells: known functions, no assignment in
    place."""
    return all(_harmless(source, node) for node in ast.walk(inside))


def keeps(source: Source, loop: Loop, expression: ast.expr) -> bool:
    """Whether an expression's names mean the same tensors, with the same content, throughout the loop."""
    names = {node.id for node in ast.walk(expression) if isinstance(node, ast.Name)}
    rebound = {
        node.id
        for node in ast.walk(loop)
        if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load)
    }
    if names & rebound:
        return False
    if changes_nothing(source, loop):
        return True
    if any(
        isinstance(node, ast.Attribute) and _is_data(source, node) for node in ast.walk(expression)
    ):
        return False
    own = [name for name in names if name not in source.imported]
    return all(
        was_fresh(source, name, loop) and all(only_reads(source, use) for use in loads(loop, name))
        for name in own
    )


def _is_data(source: Source, node: ast.Attribute) -> bool:
    outer = source.parents[node]
    return not (isinstance(outer, ast.Call) and outer.func is node) and source.dotted(node) is None


def _harmless(source: Source, node: ast.AST) -> bool:
    if isinstance(node, ast.Call):
        words = {word.arg for word in node.keywords}
        called = ast.Call(node.func, [], [])
        return (is_pure(called, source) and not words & {"out", "inplace"}) or _is_known(node)
    if isinstance(node, ast.Attribute | ast.Subscript):
        return isinstance(node.ctx, ast.Load)
    if isinstance(node, ast.AugAssign):
        name = node.target.id if isinstance(node.target, ast.Name) else ""
        return bool(name and literal_stores(source, source.function(node), name))
    return not isinstance(node, ast.Await | ast.Yield | ast.YieldFrom | ast.With | ast.AsyncFor)


def _is_known(call: ast.Call) -> bool:
    if any(word.arg in ("out", "inplace", None) for word in call.keywords):
        return False
    if isinstance(call.func, ast.Attribute):
        return call.func.attr in _HARMLESS_METHODS
    return isinstance(call.func, ast.Name) and call.func.id in _HARMLESS
