"""Names that are given a selection and read in one expression only, with no change between."""

from __future__ import annotations

import ast

from torchtrim.rewriter.replace import runs_first
from torchtrim.source.purity import is_pure
from torchtrim.source.selections import selection
from torchtrim.source.source import Source
from torchtrim.source.uses import loads, names_in, stores


def named_values(source: Source, node: ast.expr) -> dict[str, ast.Assign]:
    """The assignments that give a selection, or what is made of one, a name to be read in an expression only.

    They stand in the statements before it, in the same block, with nothing but pure assignments between,
    and none that binds what they are made of; and before it in its own statement nothing has an effect. A
    name may be read in the value of another such name.
    """
    function = source.function(node)
    is_function = isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef)
    if not is_function or not runs_first(source, node):
        return {}
    block = source.block(source.statement(node))
    at = next((n for n, one in enumerate(block) if one is source.statement(node)), 0)
    inside = {id(one) for one in ast.walk(node)}
    read = names_in(node)
    found: dict[str, ast.Assign] = {}
    bound: set[str] = set()
    for statement in reversed(block[:at]):
        name = _name(statement)
        if name in read and isinstance(statement, ast.Assign):
            if names_in(statement.value) & bound:
                break
            if _only_here(function, name, inside):
                found[name] = statement
                inside |= {id(one) for one in ast.walk(statement.value)}
                read |= names_in(statement.value)
        if not _plain(source, statement):
            break
        bound |= {one.id for one in ast.walk(statement) if _binds(one)}  # type: ignore[attr-defined]
    return {name: one for name, one in found.items() if _selects(source, one.value, found)}


def _name(statement: ast.stmt) -> str:
    """The name that a statement gives a value to; empty where it does anything else."""
    if not isinstance(statement, ast.Assign) or len(statement.targets) != 1:
        return ""
    target = statement.targets[0]
    return target.id if isinstance(target, ast.Name) else ""


def _selects(source: Source, value: ast.expr, found: dict[str, ast.Assign]) -> bool:
    """Whether a selection is in the value, or in that of a name in it."""
    for part in ast.walk(value):
        if selection(part, source) is not None:
            return True
        named = found.get(part.id) if isinstance(part, ast.Name) else None
        if named is not None and named.value is not value and _selects(source, named.value, found):
            return True
    return False


def _only_here(function: ast.AST, name: str, inside: set[int]) -> bool:
    declared = any(
        isinstance(one, ast.Global | ast.Nonlocal) and name in one.names
        for one in ast.walk(function)
    )
    return (
        not declared
        and len(list(stores(function, name))) == 1
        and all(id(use) in inside for use in loads(function, name))
    )


def _plain(source: Source, statement: ast.stmt) -> bool:
    """Whether it only gives names to pure values."""
    if not isinstance(statement, ast.Assign) or not is_pure(statement.value, source):
        return False
    return all(isinstance(target, ast.Name) for target in statement.targets)


def _binds(node: ast.AST) -> bool:
    return isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load)
