"""Expressions that move data between host and device: reads and uploads."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import NamedTuple

from torchtrim.records.probes import ObservedValue
from torchtrim.source.facts import Facts, is_tensor
from torchtrim.source.nodes import (
    Comprehension,
    called,
    function_of,
    keywords_of,
    method_of,
    receiver,
)
from torchtrim.source.operations import PURE
from torchtrim.source.source import Function, SourceFile, children

_CASTS = ("float", "int", "bool")
READS = ("item", *_CASTS)
"""The functions and methods that a read calls."""


class Read(NamedTuple):
    """A read of a tensor by the host. `cast` is `float`, `int`, `bool` or `""`."""

    node: ast.Call
    tensor: ast.expr
    cast: str


def read_of(node: ast.AST, source: SourceFile) -> Read | None:
    """Return the read that an expression is, or None. `float(x)` is one if `x` may be a tensor."""
    if not isinstance(node, ast.Call) or node.keywords:
        return None
    if isinstance(node.func, ast.Attribute) and node.func.attr == "item" and not node.args:
        return Read(node, without_detach(node.func.value), "")
    name = function_of(node)
    if name not in _CASTS or len(node.args) != 1:
        return None
    value = node.args[0]
    if inner := read_of(value, source):
        return Read(node, inner.tensor, name) if not inner.cast else None
    if isinstance(value, ast.Call):
        dotted = source.dotted(value.func)
        tensor = (dotted or "").startswith("torch.") or (
            dotted is None and method_of(value) in PURE
        )
    else:
        tensor = isinstance(value, ast.Name | ast.Attribute | ast.Subscript)
    return Read(node, without_detach(value), name) if tensor else None


def without_detach(node: ast.expr) -> ast.expr:
    """Strip `.detach()`, `.cpu()`, `.data` and the like, which do not change the value that is read."""
    while True:
        inner = node.value if isinstance(node, ast.Attribute) and node.attr == "data" else None
        if isinstance(node, ast.Call) and not node.args and not node.keywords:
            inner = receiver(node, ("detach", "cpu", "clone", "contiguous"))
        if inner is None:
            return node
        node = inner


def reads_in(node: ast.AST, source: SourceFile) -> Iterator[Read]:
    """Yield the outermost reads in an expression, in the order of the code."""
    if read := read_of(node, source):
        yield read
    elif not isinstance(node, Function | Comprehension):
        for child in children(node):
            yield from reads_in(child, source)


def is_single(seen: ObservedValue) -> bool:
    """Return True for a tensor of one element."""
    return is_tensor(seen) and all(size == 1 for size in seen.shape)


def has_own_text(source: SourceFile, node: ast.AST) -> bool:
    """Return True if the node's position is correct: inside an f-string, Python may report a wrong one."""
    try:
        found = ast.parse(f"({source.segment(node)}\n)", mode="eval").body
    except (SyntaxError, ValueError):
        return False
    return ast.dump(found) == ast.dump(node)


class Upload(NamedTuple):
    """A tensor created on the host and moved to a device: its constructor call, and all up to the move.

    `device` is None for `.cuda()`. `between` are the calls between the constructor and the move, and `dtype`
    is the type that the move casts to, if any.
    """

    made: ast.Call
    whole: ast.expr
    device: ast.expr | None
    between: tuple[ast.Call, ...]
    dtype: ast.expr | None = None

    @property
    def words(self) -> dict[str | None, ast.expr]:
        """The keyword arguments of the constructor call."""
        return keywords_of(self.made)


def uploads(source: SourceFile, names: frozenset[str], *, cast: bool = False) -> Iterator[Upload]:
    """Yield each call of these torch functions whose result is moved to a device, or created there.

    `cast`: also if the move casts it to another type.
    """
    for node in source.calls(*names):
        module, _, name = (source.dotted(node.func) or "").rpartition(".")
        known = module == "torch" and name in names
        upload = _upload(source, node) if known else None
        if upload is not None and (cast or upload.dtype is None):
            yield upload


def need_device(facts: Facts, text: str) -> None:
    """Require that `D` is a device: `.to` takes types and tensors too."""
    facts.need(
        f"`{text}` is a device",
        lambda v: v.D.kind in ("device", "str") and "torch." not in v.D.value,
    )


def _upload(source: SourceFile, node: ast.Call) -> Upload | None:
    between: list[ast.Call] = []
    at: ast.expr = node
    while isinstance(method := source.parents[at], ast.Attribute):
        call = source.parents[method]
        if not isinstance(call, ast.Call) or call.func is not method:
            break
        if method.attr in ("to", "cuda"):
            return _moved(node, call, tuple(between))
        between.append(call)
        at = call
    device = keywords_of(node).get("device")
    return Upload(node, node, device, ()) if device is not None else None


def _moved(made: ast.Call, move: ast.Call, between: tuple[ast.Call, ...]) -> Upload | None:
    words = keywords_of(move)
    words.pop("non_blocking", None)
    targets = [*move.args, *([words.pop("device")] if "device" in words else [])]
    dtype = words.pop("dtype", None)
    if dtype is None and len(targets) == 2:
        dtype = targets.pop()
    if words or len(targets) > 1 or any(isinstance(one, ast.Starred) for one in targets):
        return None
    if not targets:
        return Upload(made, move, None, between) if called(move.func) == "cuda" else None
    return Upload(made, move, targets[0], between, dtype)
