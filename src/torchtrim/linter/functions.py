"""Names, attributes and dicts that hold functions: which ones, and what calling them gives."""

from __future__ import annotations

import ast
import builtins
from functools import reduce

from torchtrim.linter import torch_names as names
from torchtrim.linter.kinds import UNKNOWN, Kind, function, joined, unsure
from torchtrim.linter.scope import Scope
from torchtrim.linter.torch_calls import Call, called_function

KNOWN_MODULES = ("torch.", "numpy.", "math.", "time.", "os.", "scipy.", "PIL.", "cv2.")
_SELF = "self."
_BUILTIN = frozenset(name for name in dir(builtins) if name.islower())


def referred(scope: Scope, node: ast.expr | None) -> Kind:
    """The function that an expression names without calling it: of torch, of a file, or a method of `self`.

    Unknown for anything else. A function is a name in small letters, or a layer of torch.
    """
    if isinstance(node, ast.IfExp):
        return joined(referred(scope, node.body), referred(scope, node.orelse))
    if isinstance(node, ast.Call) and scope.dotted(node.func) == "functools.partial" and node.args:
        return referred(scope, node.args[0])
    if isinstance(node, ast.Name) and _is_named(scope, node.id):
        return function(node.id)
    if _is_own(scope, node):
        assert isinstance(node, ast.Attribute)
        return function(f"{_SELF}{node.attr}")
    full = scope.dotted(node) if node is not None else None
    return function(full) if full is not None and _is_function(full) else UNKNOWN


def called(scope: Scope, held: Kind, call: Call) -> Kind:
    """What calling one of the functions gives that a name holds, by those of them that are known.

    A function that waits itself is reported only where it can be no other. Where one is not known that it may
    be, what it gives is not surely a tensor.
    """
    names = [name for name, _ in held.items]
    with scope.silent(len(names) + (held.part is not None) > 1):
        given = [_called(scope, name, call) for name in names]
    known = [
        kind for name, kind in zip(names, given, strict=True) if kind != UNKNOWN or name in _BUILTIN
    ]
    is_open = len(known) < len(names)
    if held.part is not None:
        known.append(held.part)
    found = reduce(joined, known) if known else UNKNOWN
    return unsure(found) if is_open else found


def _called(scope: Scope, name: str, call: Call) -> Kind:
    if name.startswith(KNOWN_MODULES):
        return called_function(name, call)
    if name.startswith(_SELF):
        return (scope.this.returned(name[len(_SELF) :]) if scope.this else None) or UNKNOWN
    return scope.file.returns.get(name) or scope.file.outside(name)


def _is_named(scope: Scope, name: str) -> bool:
    """Whether it is a function of the file, or a builtin one."""
    if name in scope.file.returns:
        return name not in scope.env
    known = (scope.env, scope.file.imports, scope.file.own, scope.file.classes)
    return name in _BUILTIN and not any(name in one for one in known)


def _is_own(scope: Scope, node: ast.expr | None) -> bool:
    owner = node.value if isinstance(node, ast.Attribute) else None
    mine = isinstance(owner, ast.Name) and owner.id == "self" and scope.this is not None
    return mine and scope.this.returned(node.attr) is not None  # type: ignore[union-attr]


def _is_function(full: str) -> bool:
    head, _, last = full.rpartition(".")
    if full.startswith("torch."):
        return last in names.FUNCTIONS | names.FUNCTIONAL or last in names.LAYERS
    return bool(head) and last.islower()
