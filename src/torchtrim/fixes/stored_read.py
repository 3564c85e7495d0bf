"""`losses[i] = loss.item()` of a tensor on the device becomes `losses[i] = loss.detach()`.

The number is read, and written back to where it came from. Assigning the tensor copies it on the device, with
the same conversion.

Applies if the function itself creates `losses` there, as floats: an integer type refuses numbers that it
cannot hold, where a copy gives any.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

from torchtrim.rewriter.fix import Fix, Match, Writing
from torchtrim.rewriter.replace import atom, instead
from torchtrim.source.facts import Facts, FixRefused, is_tensor
from torchtrim.source.names import assigned_to, is_private, parameters, stores
from torchtrim.source.nodes import called, constant_of, keywords_of, name_set
from torchtrim.source.source import Function, SourceFile, within
from torchtrim.source.transfers import has_own_text, read_of

_FILLED = name_set("zeros ones empty")
_UNGRADED = name_set("no_grad inference_mode")
_FLOATS = name_set("float float16 float32 float64 half double bfloat16")


def _find(source: SourceFile) -> Iterator[Match]:
    for node in source.each(ast.Assign):
        (target, *others), read = node.targets, read_of(node.value, source)
        if read is None or read.cast not in ("", "float") or others:
            continue
        kept = isinstance(target, ast.Subscript) and isinstance(target.value, ast.Name)
        if kept and has_own_text(source, read.node):
            yield Match(fix=FIX, source=source, node=read.node, parts={"X": read.tensor})


def _write(match: Match, facts: Facts) -> Writing:
    source, node = match.source, match.node_as(ast.Call)
    target = source.statement(node).targets[0].value  # type: ignore[attr-defined]
    if not _is_floating_on_device(source, target):
        raise FixRefused(f"`{target.id}` is not created in this function, as floats on a device")
    match.need(facts, "X", "is a tensor", is_tensor, static=True)
    text = atom(source, match.parts["X"])
    return Writing(
        (instead(source, node, text if _is_ungraded(source, node) else f"{text}.detach()"),)
    )


def _is_ungraded(source: SourceFile, node: ast.AST) -> bool:
    """Return True if autograd records nothing there, by a decorator of the function or a `with` in it."""
    function = source.function(node)
    outer = [
        one for one in source.around(node) if isinstance(one, ast.With) and within(one, function)
    ]
    used = [item.context_expr for one in outer for item in one.items]
    used += getattr(function, "decorator_list", [])
    names = [called(one.func if isinstance(one, ast.Call) else one) for one in used]
    return not _UNGRADED.isdisjoint(names) and not names.count("enable_grad")


def _is_floating_on_device(source: SourceFile, use: ast.Name) -> bool:
    """Return True if a name of the function is only ever a new tensor of floats on a device."""
    function = source.function(use)
    made = [assigned_to(source, store) for store in stores(function, use.id)]
    if not isinstance(function, Function) or use.id in parameters(function):
        return False
    own = bool(made) and is_private(source, function, use.id)
    return own and all(_makes_floats(source, value) for value in made)


def _makes_floats(source: SourceFile, value: ast.expr | None) -> bool:
    if not isinstance(value, ast.Call):
        return False
    module, _, name = (source.dotted(value.func) or "").rpartition(".")
    words = keywords_of(value)
    typed = "dtype" not in words or called(words["dtype"]) in _FLOATS
    on_device = "device" in words and constant_of(words["device"]) != "cpu"
    plain = module == "torch" and name in _FILLED and words.keys() <= {"device", "dtype"}
    return plain and typed and on_device


FIX = Fix(codes=("TT101",), equivalence="BITWISE", find=_find, write=_write)
