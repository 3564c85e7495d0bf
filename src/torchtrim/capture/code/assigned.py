"""Reads of attributes that the same call has set: they do not see what an earlier call left."""

from __future__ import annotations

import ast
import types
from collections.abc import Iterable, Iterator
from typing import Any

from torch import nn

from torchtrim.capture.code.live import Scope

AttributePlace = tuple[int, str]
"""The id of a module, and the name of an attribute."""
_AT_TIMES = (
    ast.Lambda,
    ast.IfExp,
    ast.BoolOp,
    ast.ListComp,
    ast.SetComp,
    ast.DictComp,
    ast.GeneratorExp,
)
_ENDS_EARLY = (ast.Return, ast.Yield, ast.YieldFrom)


def reads_of_this_call(scope: Scope) -> set[int]:
    """Return the ids of the nodes of a function that read an attribute of a module which this call has set.

    What sets it runs in each call: an assignment, or a call of a module whose forward assigns it.
    """
    found: set[int] = set()
    known: set[AttributePlace] = set()
    for statement in _outermost(scope):
        for node in ast.walk(statement):
            if not isinstance(node, ast.Attribute) or not isinstance(node.ctx, ast.Load):
                continue
            if (id(scope.value(node.value).value), node.attr) in known:
                found.add(id(node))
        known.update(_set_by(statement, scope))
    return found


def _set_by(statement: ast.stmt, scope: Scope) -> Iterator[AttributePlace]:
    """Yield what a statement sets, itself and by the modules that it calls."""
    for target in _attributes_set(statement):
        if isinstance(owner := scope.value(target.value).value, nn.Module):
            yield id(owner), target.attr
    for call in _unconditional_calls(statement):
        if isinstance(called := scope.value(call.func).value, nn.Module):
            yield from ((id(called), name) for name in _set_in_forward(called))


def _set_in_forward(module: nn.Module) -> Iterator[str]:
    """Yield the attributes that a module's forward sets on the module in each call."""
    kind = type(module)
    forward: Any = kind.forward
    if "forward" in vars(module) or kind.__call__ is not nn.Module.__call__:
        return
    scope = Scope.of(forward) if isinstance(forward, types.FunctionType) else None
    if scope is None or not scope.parameters:
        return
    for statement in _outermost(scope):
        for target in _attributes_set(statement):
            if isinstance(target.value, ast.Name) and target.value.id == scope.parameters[0]:
                yield target.attr
        if any(isinstance(node, _ENDS_EARLY) for node in ast.walk(statement)):
            return


def _outermost(scope: Scope) -> list[ast.stmt]:
    """Return the outermost statements of a function; a lambda has none."""
    return [] if isinstance(scope.node, ast.Lambda) else scope.node.body


def _attributes_set(statement: ast.stmt) -> Iterator[ast.Attribute]:
    targets: Iterable[ast.expr] = ()
    if isinstance(statement, ast.Assign):
        targets = statement.targets
    elif isinstance(statement, ast.AnnAssign) and statement.value is not None:
        targets = [statement.target]
    return (one for one in targets if isinstance(one, ast.Attribute))


def _unconditional_calls(node: ast.AST) -> Iterator[ast.Call]:
    """Yield the calls that run whenever a simple statement does."""
    if isinstance(node, ast.stmt) and not isinstance(node, (ast.Assign, ast.AnnAssign, ast.Expr)):
        return
    if isinstance(node, _AT_TIMES):
        return
    if isinstance(node, ast.Call):
        yield node
    for inner in ast.iter_child_nodes(node):
        yield from _unconditional_calls(inner)
