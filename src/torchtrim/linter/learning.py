"""Which functions of a file have to be followed for what they tell others: most tell nothing asked for."""

from __future__ import annotations

import ast
from collections.abc import Iterator

_BLOCKS = ("body", "orelse", "finalbody", "handlers", "cases")
Function = ast.FunctionDef | ast.AsyncFunctionDef


def keeps(function: Function) -> bool:
    """Whether its code leaves something behind: an attribute of `self`, a buffer, an import, a class."""
    pending: list[ast.AST] = list(function.body)
    while pending:
        one = pending.pop()
        if isinstance(one, ast.Import | ast.ImportFrom | ast.ClassDef) or _registers(one):
            return True
        if any(map(_is_of_self, _targets(one))):
            return True
        for name in _BLOCKS:
            pending += getattr(one, name, ())
    return False


def is_asked_for(name: str, text: str, *, method: bool) -> bool:
    """Whether a file's text may use what a function of it returns, or the method of `self`."""
    return f"self.{name}" in text if method else text.count(name) > 1


def _registers(statement: ast.AST) -> bool:
    called = statement.value if isinstance(statement, ast.Expr) else None
    function = called.func if isinstance(called, ast.Call) else None
    return isinstance(function, ast.Attribute) and function.attr == "register_buffer"


def _targets(statement: ast.AST) -> Iterator[ast.AST]:
    """What a statement binds, in tuples too."""
    if isinstance(statement, ast.Assign):
        given = statement.targets
    elif isinstance(statement, ast.AnnAssign | ast.AugAssign | ast.For | ast.AsyncFor):
        given = [statement.target]
    elif isinstance(statement, ast.With | ast.AsyncWith):
        given = [item.optional_vars for item in statement.items if item.optional_vars is not None]
    else:
        return
    pending = list(given)
    while pending:
        one = pending.pop()
        if isinstance(one, ast.Tuple | ast.List):
            pending += one.elts
        else:
            yield one.value if isinstance(one, ast.Starred) else one


def _is_of_self(target: ast.AST) -> bool:
    owner = target.value if isinstance(target, ast.Attribute) else None
    return isinstance(owner, ast.Name) and owner.id == "self"
