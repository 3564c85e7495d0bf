"""Where a function's code reads a name, and where it binds one."""

from __future__ import annotations

import ast
from collections.abc import Iterator


def loads(function: ast.AST, name: str) -> Iterator[ast.Name]:
    """Each place of a function's code, nested functions included, that reads a name."""
    for node in ast.walk(function):
        if isinstance(node, ast.Name) and node.id == name and isinstance(node.ctx, ast.Load):
            yield node


def stores(function: ast.AST, name: str) -> Iterator[ast.Name]:
    """Each place of a function's code that binds or deletes a name."""
    for node in ast.walk(function):
        if isinstance(node, ast.Name) and node.id == name and not isinstance(node.ctx, ast.Load):
            yield node
