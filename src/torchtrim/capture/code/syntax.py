"""Writes that a function's syntax alone shows."""

from __future__ import annotations

import ast
import itertools
from collections.abc import Sequence

from torchtrim.capture.code.live import own_nodes


def filled_once(nodes: Sequence[ast.AST]) -> dict[int, set[str]]:
    """Return the writes at each node that a test lets happen once: `if x is None`, `if key not in x`."""
    found: dict[int, set[str]] = {}
    for node in nodes:
        match node:
            case ast.If(test=ast.Compare(left, [ast.Is()], [ast.Constant(value=None)])):
                name = ast.unparse(left)
            case ast.If(test=ast.Compare(_, [ast.NotIn()], [container])):
                name = ast.unparse(container)
            case _:
                continue
        for inner in itertools.chain.from_iterable(map(ast.walk, node.body)):
            found.setdefault(id(inner), set()).add(name)
    return found


def opens_for_writing(call: ast.Call) -> bool:
    """Return True if a call of `open` may write."""
    modes = [*call.args[1:2], *(k.value for k in call.keywords if k.arg == "mode")]
    return any(
        not isinstance(one, ast.Constant) or set("wax+") & set(str(one.value)) for one in modes
    )


def raising(node: ast.AST) -> set[ast.AST]:
    """Return the nodes of blocks that end with an exception: they print at most once."""
    found: set[ast.AST] = set()
    for one in own_nodes(node):
        for body in (getattr(one, "body", None), getattr(one, "orelse", None)):
            if isinstance(body, list) and body and isinstance(body[-1], ast.Raise):
                found.update(itertools.chain.from_iterable(map(ast.walk, body)))
    return found


def appended_to(node: ast.AST) -> ast.expr | None:
    """Return the name that a call appends one value to, or None for other code."""
    match node:
        case ast.Call(ast.Attribute((ast.Name() | ast.Attribute()) as owner, "append"), [_], []):
            return owner
    return None


def name_of(node: ast.AST) -> str:
    """Return the name of a variable or an attribute, or an empty string for another expression."""
    return str(getattr(node, "id", getattr(node, "attr", "")))
