"""Tensors that are made on the host and moved: `torch.zeros(n).to(device)`, `torch.tensor(0.0).cuda()`."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import NamedTuple

from torchtrim.source.facts import Facts
from torchtrim.source.source import Source

_MOVES = ("to", "cuda")


class Upload(NamedTuple):
    """A call of torch that makes a tensor, the whole that ends with its move, and where to.

    `device` is None for `.cuda()`. `between` are the calls from the making to the move.
    """

    made: ast.Call
    whole: ast.expr
    device: ast.expr | None
    between: tuple[ast.Call, ...]

    @property
    def words(self) -> dict[str | None, ast.expr]:
        """The keywords of the making."""
        return {word.arg: word.value for word in self.made.keywords}


def uploads(source: Source, names: frozenset[str]) -> Iterator[Upload]:
    """Each making by one of the functions of torch that ends on another device, or is made there."""
    for node in source.at({(ast.Call, name) for name in names}):
        assert isinstance(node, ast.Call)
        dotted = source.dotted(node.func) or ""
        if dotted.rpartition(".")[0] == "torch" and dotted.rpartition(".")[2] in names:
            found = _upload(source, node)
            if found is not None:
                yield found


def need_device(facts: Facts, text: str) -> None:
    """`D` must say where to, and nothing else, as `.to` takes types and tensors too."""
    facts.need(
        f"`{text}` is a device",
        lambda v: v.D.kind in ("device", "str") and "torch." not in v.D.value,
    )


def _upload(source: Source, node: ast.Call) -> Upload | None:
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


def _method_call(source: Source, node: ast.expr) -> ast.Call | None:
    attribute = source.parents[node]
    call = source.parents.get(attribute)
    if not isinstance(attribute, ast.Attribute) or not isinstance(call, ast.Call):
        return None
    return call if call.func is attribute else None


def _where(call: ast.Call) -> tuple[ast.expr | None] | None:
    """Where a move goes; None for one that does something else too."""
    assert isinstance(call.func, ast.Attribute)
    words = {word.arg: word.value for word in call.keywords}
    words.pop("non_blocking", None)
    given = [*call.args, *(words.pop(name) for name in ("device",) if name in words)]
    if words or len(given) > 1 or any(isinstance(one, ast.Starred) for one in given):
        return None
    if call.func.attr == "to" and not given:
        return None
    return (given[0] if given else None,)
