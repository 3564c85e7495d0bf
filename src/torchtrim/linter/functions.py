"""Names, attributes and dicts that hold functions: which ones, and what calling them gives."""

from __future__ import annotations

import ast
from functools import reduce

from torchtrim.linter import torch_names as names
from torchtrim.linter.kinds import UNKNOWN, Kind, function, joined
from torchtrim.linter.scope import Scope
from torchtrim.linter.torch_calls import Call, called_function

KNOWN_MODULES = ("torch.", "numpy.", "math.", "time.", "os.", "scipy.", "PIL.", "cv2.")
_SELF = "self."


def referred(scope: Scope, node: ast.expr | None) -> Kind:
    """The function that an expression names without calling it: of torch, of a file, or a method of `self`.

    Unknown for anything else. A function is a name in small letters, or a layer of torch.
    """
    if isinstance(node, ast.IfExp):
        return joined(referred(scope, node.body), referred(scope, node.orelse))
    if isinstance(node, ast.Call) and scope.dotted(node.func) == "functools.partial" and node.args:
        return referred(scope, node.args[0])
    if isinstance(node, ast.Name) and node.id in scope.file.returns and node.id not in scope.env:
        return function(node.id)
    if _is_own(scope, node):
        assert isinstance(node, ast.Attribute)
        return function(f"{_SELF}{node.attr}")
    full = scope.dotted(node) if node is not None else None
    return function(full) if full is not None and _is_function(full) else UNKNOWN


def called(scope: Scope, held: Kind, call: Call) -> Kind:
    """What calling one of the functions gives that a name holds, by those of them that are known.

    A wait is reported only where it can be no other function.
    """
    with scope.silent(len(held.items) + (held.part is not None) > 1):
        given = [_called(scope, name, call) for name, _ in held.items]
    if held.part is not None:
        given.append(held.part)
    known = [kind for kind in given if kind != UNKNOWN]
    return reduce(joined, known) if known else UNKNOWN


def _called(scope: Scope, name: str, call: Call) -> Kind:
    if name.startswith(KNOWN_MODULES):
        return called_function(name, call)
    if name.startswith(_SELF):
        return (scope.this.returned(name[len(_SELF) :]) if scope.this else None) or UNKNOWN
    return scope.file.returns.get(name) or scope.file.outside(name)


def _is_own(scope: Scope, node: ast.expr | None) -> bool:
    owner = node.value if isinstance(node, ast.Attribute) else None
    mine = isinstance(owner, ast.Name) and owner.id == "self" and scope.this is not None
    return mine and scope.this.returned(node.attr) is not None  # type: ignore[union-attr]


def _is_function(full: str) -> bool:
    head, _, last = full.rpartition(".")
    if full.startswith("torch."):
        return last in names.FUNCTIONS | names.FUNCTIONAL or last in names.LAYERS
    return bool(head) and last.islower() and not full.startswith(KNOWN_MODULES)
