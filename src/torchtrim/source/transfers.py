"""Expressions that move data between host and device: reads and uploads."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import NamedTuple

from torchtrim.records.probes import ObservedValue
from torchtrim.source.facts import Facts, is_tensor
from torchtrim.source.operations import PURE
from torchtrim.source.source import Function, SourceFile, children

_SAME_VALUE = frozenset(("detach", "cpu", "clone", "contiguous"))
_CASTS = ("float", "int", "bool")
READS = ("item", *_CASTS)
"""The functions and methods that a read calls."""


class Read(NamedTuple):
    """A read of a tensor by the host. `cast` is `float`, `int`, `bool` or `""`."""

    node: ast.Call
    tensor: ast.expr
    cast: str


def read_of(node: ast.AST, source: SourceFile) -> Read | None:
    """Return the read that an expression is, or None.

    `float(x)` counts only if `x` may be a tensor by its form: a name, an attribute, an item or a tensor
    method.
    """
    if not isinstance(node, ast.Call) or node.keywords:
        return None
    if isinstance(node.func, ast.Attribute) and node.func.attr == "item" and not node.args:
        return Read(node, without_detach(node.func.value), "")
    if isinstance(node.func, ast.Name) and node.func.id in _CASTS and len(node.args) == 1:
        return _cast(node, node.func.id, source)
    return None


def without_detach(node: ast.expr) -> ast.expr:
    """Strip `.detach()`, `.cpu()`, `.data` and the like, which do not change the value that is read."""
    while True:
        if isinstance(node, ast.Attribute) and node.attr == "data":
            node = node.value
        elif (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and node.func.attr in _SAME_VALUE
            and not node.args
            and not node.keywords
        ):
            node = node.func.value
        else:
            return node


def reads_in(node: ast.AST, source: SourceFile) -> Iterator[Read]:
    """Yield the outermost reads in an expression, in the order of the code."""
    found = read_of(node, source)
    if found is not None:
        yield found
        return
    if isinstance(node, Function | ast.GeneratorExp | ast.ListComp | ast.SetComp | ast.DictComp):
        return
    for child in children(node):
        yield from reads_in(child, source)


def is_single(seen: ObservedValue) -> bool:
    """Return True for a tensor of one element."""
    return is_tensor(seen) and all(size == 1 for size in seen.shape)


def need_single(facts: Facts, part: str, text: str) -> None:
    """Require that a part is a tensor of one element."""
    facts.need(f"`{text[:60]}` is a tensor of one element", lambda v: is_single(getattr(v, part)))


def has_own_text(source: SourceFile, node: ast.AST) -> bool:
    """Return True if the node's position is correct: inside an f-string, Python may report a wrong one."""
    try:
        found = ast.parse(f"({source.segment(node)}\n)", mode="eval").body
    except (SyntaxError, ValueError):
        return False
    return ast.dump(found) == ast.dump(node)


def _cast(node: ast.Call, name: str, source: SourceFile) -> Read | None:
    inner = read_of(node.args[0], source)
    if inner is not None:
        return Read(node, inner.tensor, name) if not inner.cast else None
    value = node.args[0]
    if isinstance(value, ast.Name | ast.Attribute | ast.Subscript):
        return Read(node, without_detach(value), name)
    if isinstance(value, ast.Call):
        dotted = source.dotted(value.func)
        method = isinstance(value.func, ast.Attribute) and value.func.attr in PURE
        if (dotted is None and method) or (dotted or "").startswith("torch."):
            return Read(node, without_detach(value), name)
    return None


_MOVES = ("to", "cuda")


class Upload(NamedTuple):
    """A tensor created on the host and moved to a device: the constructor call, and the expression up to the
    move.

    `device` is None for `.cuda()`. `between` are the calls between the constructor and the move.
    """

    made: ast.Call
    whole: ast.expr
    device: ast.expr | None
    between: tuple[ast.Call, ...]

    @property
    def words(self) -> dict[str | None, ast.expr]:
        """The keyword arguments of the constructor call."""
        return {word.arg: word.value for word in self.made.keywords}


def uploads(source: SourceFile, names: frozenset[str]) -> Iterator[Upload]:
    """Yield each call of these torch functions whose result is moved to a device, or created there."""
    for node in source.at({(ast.Call, name) for name in names}):
        assert isinstance(node, ast.Call)
        dotted = source.dotted(node.func) or ""
        if dotted.rpartition(".")[0] == "torch" and dotted.rpartition(".")[2] in names:
            found = _upload(source, node)
            if found is not None:
                yield found


def need_device(facts: Facts, text: str) -> None:
    """Require that `D` is a device: `.to` takes types and tensors too."""
    facts.need(
        f"`{text}` is a device",
        lambda v: v.D.kind in ("device", "str") and "torch." not in v.D.value,
    )


def _upload(source: SourceFile, node: ast.Call) -> Upload | None:
    between: list[ast.Call] = []
    at: ast.expr = node
    while (call := _method_call(source, at)) is not None:
        assert isinstance(call.func, ast.Attribute)
        if call.func.attr in _MOVES:
            where = _where(call)
            return where and Upload(node, call, where[0], tuple(between))
        between.append(call)
        at = call
    device = next((word.value for word in node.keywords if word.arg == "device"), None)
    return Upload(node, node, device, ()) if device is not None else None


def _method_call(source: SourceFile, node: ast.expr) -> ast.Call | None:
    attribute = source.parents[node]
    call = source.parents.get(attribute)
    if not isinstance(attribute, ast.Attribute) or not isinstance(call, ast.Call):
        return None
    return call if call.func is attribute else None


def _where(call: ast.Call) -> tuple[ast.expr | None] | None:
    """Return the target of a move in a tuple, or None if the call does something else too."""
    assert isinstance(call.func, ast.Attribute)
    words = {word.arg: word.value for word in call.keywords}
    words.pop("non_blocking", None)
    given = [*call.args, *(words.pop(name) for name in ("device",) if name in words)]
    if words or len(given) > 1 or any(isinstance(one, ast.Starred) for one in given):
        return None
    if call.func.attr == "to" and not given:
        return None
    return (given[0] if given else None,)
