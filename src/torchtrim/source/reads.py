"""Reads of the device, `t.item()` and `float(t)`, and computations with them."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import NamedTuple

from torchtrim.records.seen import Seen
from torchtrim.source.facts import Facts, is_tensor
from torchtrim.source.source import Function, Source, children
from torchtrim.source.tensor_methods import PURE

_SAME_VALUE = frozenset(("detach", "cpu", "clone", "contiguous"))
_CASTS = ("float", "int", "bool")
READS = ("item", *_CASTS)
"""The functions of which a read is a call."""


class Read(NamedTuple):
    """A read: the call, the tensor that is read, and what its value is made: `float`, `int` or nothing."""

    node: ast.Call
    tensor: ast.expr
    cast: str


def read_of(node: ast.AST, source: Source) -> Read | None:
    """The read that an expression is, None where it is of another form.

    `float(x)` is one only where `x` may be a tensor by its form: a name, an attribute or a method of one.
    """
    if not isinstance(node, ast.Call) or node.keywords:
        return None
    if isinstance(node.func, ast.Attribute) and node.func.attr == "item" and not node.args:
        return Read(node, bare(node.func.value), "")
    if isinstance(node.func, ast.Name) and node.func.id in _CASTS and len(node.args) == 1:
        return _cast(node, node.func.id, source)
    return None


def bare(node: ast.expr) -> ast.expr:
    """The tensor without `.detach()`, `.cpu()` and `.data`, which do not change the value that is read."""
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


def reads_in(node: ast.AST, source: Source) -> Iterator[Read]:
    """The reads in an expression, outermost, in the order in which they stand."""
    found = read_of(node, source)
    if found is not None:
        yield found
        return
    if isinstance(node, Function | ast.GeneratorExp | ast.ListComp | ast.SetComp | ast.DictComp):
        return
    for child in children(node):
        yield from reads_in(child, source)


def is_single(seen: Seen) -> bool:
    """Whether it is a tensor of one element."""
    return is_tensor(seen) and all(size == 1 for size in seen.shape)


def needs_single(facts: Facts, part: str, text: str) -> None:
    """It must be a tensor of one element."""
    facts.need(f"`{text[:60]}` is a tensor of one element", lambda v: is_single(getattr(v, part)))


def is_whole(source: Source, node: ast.AST) -> bool:
    """Whether the text at the node's place is the node: in an f-string Python may not know the place."""
    try:
        found = ast.parse(f"({source.segment(node)}\n)", mode="eval").body
    except (SyntaxError, ValueError):
        return False
    return ast.dump(found) == ast.dump(node)


def _cast(node: ast.Call, name: str, source: Source) -> Read | None:
    inner = read_of(node.args[0], source)
    if inner is not None:
        return Read(node, inner.tensor, name) if not inner.cast else None
    value = node.args[0]
    if isinstance(value, ast.Name | ast.Attribute | ast.Subscript):
        return Read(node, bare(value), name)
    if isinstance(value, ast.Call):
        dotted = source.dotted(value.func)
        method = isinstance(value.func, ast.Attribute) and value.func.attr in PURE
        if (dotted is None and method) or (dotted or "").startswith("torch."):
            return Read(node, bare(value), name)
    return None
