"""`self.total += loss.item()` may keep the tensor: the line without its read, for a person to copy.

Most reads that maintainers take out are of numbers that only take part in arithmetic, or are kept in a list,
an attribute or a result, until something is printed. The tensor can be kept instead, and be read there. Code
that this function does not show then gets a tensor where it got a number, so the line is never written by
itself: it is shown as a diff to copy.

Refused if the number is printed, formatted, used as a size or passed to a function, which needs it, or put
into a tensor on the host; a local name may fill tensors, and go to methods of the same object.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

from torchtrim.rewriter.fix import Fix, Match, Writing
from torchtrim.rewriter.reads import computed_of
from torchtrim.rewriter.replace import atom, instead
from torchtrim.source.facts import Facts, is_tensor
from torchtrim.source.names import assigned_to, loads, stores
from torchtrim.source.nodes import called, constant_of, keywords_of, method_of, name_set, receiver
from torchtrim.source.source import Function, SourceFile
from torchtrim.source.transfers import Read, has_own_text, read_of

_ARITHMETIC = (ast.Add, ast.Sub, ast.Mult, ast.Div, ast.Pow)
_FILLING = name_set("full full_like new_full fill_ masked_fill masked_fill_ where clamp")
_HELD = (ast.Tuple, ast.List, ast.Dict)


def _find(source: SourceFile) -> Iterator[Match]:
    for node in source.calls("item", "float", "cpu", "to"):
        if (tensor := _left(source, node)) is None or read_of(source.parents[node], source):
            continue
        if (place := _place(source, node)) and has_own_text(source, node):
            yield Match(fix=FIX, source=source, node=node, parts={"X": tensor}, form=place)


def _left(source: SourceFile, node: ast.Call) -> ast.expr | None:
    """Return the tensor that a read, or a move to the host, is of."""
    if read := read_of(node, source):
        return read.tensor if read.cast in ("", "float") and _is_item(read) else None
    if called(node.func) == "cpu" and not node.args and not node.keywords:
        return receiver(node, ("cpu",))
    host = len(node.args) == 1 and constant_of(node.args[0]) == "cpu" and not node.keywords
    return receiver(node, ("to",)) if host else None


def _is_item(read: Read) -> bool:
    """Return True unless `float` may be of a Python value."""
    inner = read.node.args[0] if read.node.args else None
    return inner is None or method_of(inner) != "" or isinstance(inner, ast.Call)


def _place(source: SourceFile, node: ast.AST, depth: int = 0) -> str:
    """Return what keeps a value that takes part only in arithmetic, or `""`."""
    outer = source.parents[node]
    while isinstance(outer, ast.UnaryOp) or (
        isinstance(outer, ast.BinOp) and isinstance(outer.op, _ARITHMETIC)
    ):
        node, outer = outer, source.parents[outer]
    if isinstance(outer, ast.AugAssign) and isinstance(outer.op, _ARITHMETIC):
        summed = isinstance(outer.target, ast.Name) and computed_of(outer.value, source)
        return source.segment(outer.target) if outer.value is node and not summed else ""
    held = outer
    while isinstance(held, _HELD):
        held = source.parents[held]
    if isinstance(held, ast.Return):
        return "the result"
    if isinstance(outer, ast.Call) and method_of(outer) == "append" and node in outer.args:
        return source.segment(outer.func)
    if not isinstance(outer, ast.Assign) or len(outer.targets) > 1:
        return ""
    target = outer.targets[0]
    if isinstance(target, ast.Subscript) and _is_on_host(source, target.value):
        return ""
    if isinstance(target, ast.Attribute | ast.Subscript):
        return source.segment(target)
    function = source.function(outer)
    if not isinstance(target, ast.Name) or not isinstance(function, Function) or depth:
        return ""
    uses = loads(function, target.id)
    kept = (_place(source, use, 1) or _is_filled(source, use) for use in uses)
    return target.id if uses and all(kept) else ""


def _is_on_host(source: SourceFile, kept: ast.expr) -> bool:
    """Return True for a tensor that the function creates without a device: a copy to it waits too."""
    bound = stores(source.function(kept), kept.id) if isinstance(kept, ast.Name) else ()
    made = [assigned_to(source, store) for store in bound]
    return any(
        isinstance(value, ast.Call)
        and (source.dotted(value.func) or "").startswith("torch.")
        and "device" not in keywords_of(value)
        for value in made
    )


def _is_filled(source: SourceFile, use: ast.Name) -> bool:
    """Return True if elements become a number, are compared with it, or a method of the class gets it."""
    outer = source.parents[use]
    if isinstance(outer, ast.Compare):
        above = source.parents[outer]
        return isinstance(above, ast.Subscript) and above.slice is outer
    if isinstance(outer, ast.keyword):
        outer = source.parents[outer]
    if not isinstance(outer, ast.Call) or use is outer.func:
        return False
    own = isinstance(of := receiver(outer, {method_of(outer)}), ast.Name) and of.id == "self"
    return own or called(outer.func) in _FILLING


def _write(match: Match, facts: Facts) -> Writing:
    source, tensor = match.source, match.parts["X"]
    node = match.node_as(ast.Call)
    match.need(facts, "X", "is a tensor", is_tensor)
    text = atom(source, tensor)
    if read_of(node, source) and not isinstance(tensor, ast.Compare) and not _is_count(tensor):
        text += ".detach()"
    place = " ".join(match.form.split())[:60]
    advice = (
        f"`{place}` can keep the tensor, read where a number is needed"
        if match.form != "the result"
        else "the result can be the tensor, read where callers need a number"
    )
    return Writing((instead(source, node, text),), advice=advice)


def _is_count(tensor: ast.expr) -> bool:
    inner = receiver(tensor, ("sum", "any", "all", "max", "min", "detach"))
    return isinstance(inner, ast.Compare) or method_of(tensor) == "detach"


FIX = Fix(codes=("TT101",), equivalence="ROUNDING", find=_find, write=_write)
