"""`self.table.to(device)` in each call is moved once, and kept.

A constant of a module that is no parameter and no buffer stays on the host when the module is moved, so each
call copies it, and waits. The copy takes its place: `table = self.table = self.table.to(device)`, which
copies nothing the next time. The local name is used, so a thread that needs another device does not
disturb.

Holds where the class gives the attribute a value once, uses it in no other way, and only reads the copy.
Refused for parameters and buffers, and where the file pickles or copies modules, since the copy would go
along. Better, if the module is yours: `self.register_buffer("table", table, persistent=False)`.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

from torchtrim.rewriter.fix import Edit, Fix, Match, Writing
from torchtrim.rewriter.replace import check_comments, fresh, insert_before
from torchtrim.source.facts import Facts, Refused
from torchtrim.source.names import is_private, only_reads, only_reads_at
from torchtrim.source.source import Function, Source
from torchtrim.source.uses import loads, stores

_COPYING_NAMES = """
    pickle deepcopy copy dill joblib __getstate__ __setstate__ __reduce__ __dict__ share_memory spawn vars
    setattr getattr hasattr delattr jit script DataParallel
"""
_COPYING = frozenset(_COPYING_NAMES.split())


def find(source: Source) -> Iterator[Match]:
    """Moves of an attribute of `self`."""
    for node in source.at({(ast.Call, "to"), (ast.Call, "cuda")}):
        assert isinstance(node, ast.Call)
        if not isinstance(node.func, ast.Attribute) or not _is_own(node.func.value):
            continue
        given = node.args or [word.value for word in node.keywords if word.arg == "device"]
        if len(given) <= 1 and not {word.arg for word in node.keywords} - {
            "device",
            "non_blocking",
        }:
            parts: dict[str, ast.expr] = {"X": node.func.value}
            if given:
                parts["D"] = given[0]
            yield Match(fix=FIX, source=source, node=node, parts=parts)


def _is_own(node: ast.expr) -> bool:
    return (
        isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name)
        and node.value.id == "self"
    )


def write(match: Match, facts: Facts) -> Writing:
    """The move kept, and its result under a name."""
    source, node = match.source, match.node
    assert isinstance(node, ast.Call)
    attribute = match.parts["X"]
    assert isinstance(attribute, ast.Attribute)
    facts.need(
        f"`{match.text('X')}` is a tensor of the host that is no parameter and has no gradient",
        lambda v: v.X.kind == "tensor" and v.X.device == "cpu" and not v.X.requires_grad,
    )
    if "D" in match.parts:
        facts.need(
            f"`{match.text('D')[:60]}` is a device",
            lambda v: v.D.kind in ("device", "str") and "torch." not in v.D.value,
        )
    _check_class(source, node, attribute)
    if not _is_read(source, node):
        raise Refused(
            "the copy may be kept or written to where it goes. Register the constant as a buffer: "
            f'`self.register_buffer("{attribute.attr}", ..., persistent=False)`'
        )
    name = fresh(source, node, attribute.attr.strip("_") or "constant")
    text = source.segment(node)
    line = f"{name} = {match.text('X')} = {text}"
    edits = (
        insert_before(source, node, " ".join(part.strip() for part in line.splitlines())),
        Edit(source.start(node), source.end(node), name),
    )
    check_comments(source, edits)
    return Writing(edits)


def _check_class(source: Source, node: ast.Call, attribute: ast.Attribute) -> None:
    around = [one for one in source.around(node) if isinstance(one, ast.ClassDef)]
    name = attribute.attr
    if not around:
        raise Refused("it is in no class")
    if known := sorted(_COPYING & source.words):
        raise Refused(
            f"`{known[0]}` in this file may take the moved constant along. Register it as a buffer"
        )
    if any(isinstance(one, ast.Constant) and one.value == name for one in source.nodes):
        raise Refused(
            f"`{name}` is named in a text, as `register_buffer` does: then the module moves it"
        )
    given = 0
    for one in source.nodes:
        if isinstance(one, ast.Attribute) and one.attr == name:
            given += not isinstance(one.ctx, ast.Load)
            inside = any(outer is around[0] for outer in source.around(one))
            moved = isinstance(one.ctx, ast.Load) and _is_moved(source, one)
            made = not isinstance(one.ctx, ast.Load) and _is_made(source, one)
            if not inside or not (moved or made):
                raise Refused(f"line {one.lineno} uses `{name}` in another way")
    if given != 1:
        raise Refused(f"`self.{name}` is given a value in {given} places")


def _is_moved(source: Source, node: ast.Attribute) -> bool:
    outer = source.parents[node]
    call = source.parents[outer]
    method = isinstance(outer, ast.Attribute) and outer.attr in ("to", "cuda")
    return method and isinstance(call, ast.Call) and call.func is outer


def _is_made(source: Source, node: ast.Attribute) -> bool:
    """Whether it is given a value of its own in `__init__`, by a call."""
    function, assign = source.function(node), source.parents[node]
    return (
        isinstance(function, ast.FunctionDef)
        and function.name == "__init__"
        and isinstance(assign, ast.Assign)
        and len(assign.targets) == 1
        and isinstance(assign.value, ast.Call | ast.BinOp)
    )


def _is_read(source: Source, node: ast.Call) -> bool:
    """Whether the copy is only read where it goes, under a name too."""
    outer = source.parents[node]
    function = source.function(node)
    if isinstance(outer, ast.Assign) and len(outer.targets) == 1 and isinstance(function, Function):
        target = outer.targets[0]
        return (
            isinstance(target, ast.Name)
            and is_private(source, function, target.id)
            and len(list(stores(function, target.id))) == 1
            and all(only_reads(source, use) for use in loads(function, target.id))
        )
    if isinstance(outer, ast.Subscript) and outer.value is node:
        return only_reads_at(source, outer)
    return only_reads_at(source, node)


FIX = Fix(codes=("TT103",), equivalence="BITWISE", find=find, write=write)
