"""Constants uploaded in each iteration or call: uploaded once, and kept."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from torchtrim.rewriter.fix import Fix, Match, TextEdit, Writing
from torchtrim.rewriter.replace import fresh, insert_before
from torchtrim.source.facts import Facts, FixRefused
from torchtrim.source.names import (
    assigned_name,
    binds,
    is_private,
    loads,
    only_reads,
    only_reads_at,
    stores,
)
from torchtrim.source.nodes import is_stored, keywords_of, name_set, receiver
from torchtrim.source.operations import is_simple
from torchtrim.source.source import Function, SourceFile
from torchtrim.source.transfers import need_device, uploads

_MAKERS = name_set("tensor as_tensor")
_COPYING = name_set("""
    pickle deepcopy copy dill joblib __getstate__ __setstate__ __reduce__ __dict__ share_memory spawn vars
    setattr getattr hasattr delattr jit script DataParallel
""")


def _in_loops(source: SourceFile) -> Iterator[Match]:
    """Yield constants that a loop assigns to a name in each iteration."""
    for upload in uploads(source, _MAKERS):
        assign = source.parents[upload.whole]
        loop = source.loop(upload.whole)
        if upload.between or upload.device is None or not isinstance(assign, ast.Assign):
            continue
        if loop is not None and assign in loop.body and _is_literal(upload.made):
            parts = {"D": upload.device}
            yield Match(fix=HOISTED_CONSTANT, source=source, node=assign, parts=parts)


def _is_literal(made: ast.Call) -> bool:
    if len(made.args) != 1 or keywords_of(made).keys() & {"requires_grad", None}:
        return False
    try:
        ast.literal_eval(made.args[0])
    except (ValueError, TypeError):
        return False
    return True


def _hoisted(match: Match, facts: Facts) -> Writing:
    source, assign = match.source, match.node_as(ast.Assign)
    loop = source.loop(assign)
    assert loop is not None
    name = _name(source, assign)
    need_device(facts, match.text("D"))
    _check_loop(source, loop, assign, match.parts["D"], name)
    blanks = source.indentation(loop)
    if blanks is None or source.indentation(assign) is None or len(loop.body) == 1:
        raise FixRefused(
            "the loop or the assignment shares its line with other code, or is all of the loop's body"
        )
    start, end = source.line_start(assign.lineno), source.end(assign)
    stop = source.text.find("\n", end)
    if stop < 0 or source.text[end:stop].strip():
        raise FixRefused("other code follows in its line")
    before = source.line_start(loop.lineno)
    text = f"{blanks}{source.segment(assign)}{source.newline}"
    return Writing((TextEdit(before, before, text), TextEdit(start, stop + 1, "")))


def _name(source: SourceFile, assign: ast.Assign) -> str:
    target = assign.targets[0]
    function = source.function(assign)
    if len(assign.targets) > 1 or not isinstance(target, ast.Name):
        raise FixRefused("it is not assigned to a single name")
    if not isinstance(function, Function) or not is_private(source, function, target.id):
        raise FixRefused(f"`{target.id}` is visible outside the function")
    if len(stores(function, target.id)) > 1:
        raise FixRefused(f"`{target.id}` also gets another value")
    return target.id


def _check_loop(
    source: SourceFile, loop: ast.AST, assign: ast.Assign, device: ast.expr, name: str
) -> None:
    uses = loads(source.function(assign), name)
    if not all(only_reads(source, use) for use in uses):
        raise FixRefused(f"`{name}` may be written to, or kept")
    if assign.lineno != assign.end_lineno:
        raise FixRefused("it spans several lines")
    if not set(ast.walk(loop)).issuperset(uses):
        raise FixRefused(f"`{name}` is read after the loop, which may have had no iteration")
    if not is_simple(device) or binds(loop, device):
        raise FixRefused("the device may differ between iterations")


HOISTED_CONSTANT: Fix = Fix(
    name="hoisted_constant",
    doc="""`weights = torch.tensor([0.1, 0.9], device=d)` in a loop moves before the loop.

    Each iteration creates the same tensor on the host and copies it, and the host waits each time. The tensor
    is a constant: literal numbers, on a device that the loop does not change.

    Refused if it has another value in some iteration, may be written to, or is kept by an object that
    outlives the loop.
    """,
    codes=("TT103",),
    equivalence="BITWISE",
    find=_in_loops,
    write=_hoisted,
)


def _moves(source: SourceFile) -> Iterator[Match]:
    for node in source.calls("to", "cuda"):
        constant = receiver(node, ("to", "cuda"))
        if not isinstance(constant, ast.Attribute) or ast.unparse(constant.value) != "self":
            continue
        words = keywords_of(node)
        devices = node.args or [words[name] for name in ("device",) if name in words]
        if len(devices) <= 1 and words.keys() <= {"device", "non_blocking"}:
            parts: dict[str, ast.expr] = {"X": constant}
            parts |= dict(zip("D", devices, strict=False))
            yield Match(fix=MOVED_CONSTANT, source=source, node=node, parts=parts)


def _kept(match: Match, facts: Facts) -> Writing:
    source, node = match.source, match.node_as(ast.Call)
    attribute = match.parts["X"]
    assert isinstance(attribute, ast.Attribute)
    facts.need(
        f"`{match.text('X')[:60]}` is a tensor on the host, not a parameter, and without a gradient",
        lambda v: v.X.kind == "tensor" and v.X.device == "cpu" and not v.X.requires_grad,
    )
    if "D" in match.parts:
        need_device(facts, match.text("D")[:60])
    _check_class(source, node, attribute)
    if not _is_read(source, node):
        raise FixRefused(
            "other code may keep the copy or write to it. Register the constant as a buffer: "
            f'`self.register_buffer("{attribute.attr}", ..., persistent=False)`'
        )
    name = fresh(source, node, attribute.attr.strip("_") or "constant")
    line = f"{name} = {match.text('X')} = {source.segment(node)}"
    before = insert_before(source, node, " ".join(part.strip() for part in line.splitlines()))
    return Writing((before, TextEdit.of(source, node, name)))


def _check_class(source: SourceFile, node: ast.Call, attribute: ast.Attribute) -> None:
    name = attribute.attr
    around = next((one for one in source.around(node) if isinstance(one, ast.ClassDef)), None)
    if around is None:
        raise FixRefused("it is not in a class")
    if known := sorted(_COPYING & source.words):
        raise FixRefused(
            f"`{known[0]}` in this file may include the moved constant. Register it as a buffer"
        )
    if any(constant.value == name for constant in source.each(ast.Constant)):
        raise FixRefused(
            f"`{name}` occurs in a string, as with `register_buffer`: then the module moves it"
        )
    uses = [use for use in source.each(ast.Attribute) if use.attr == name]
    for use in uses:
        as_known = _is_assigned(source, use) if is_stored(use) else _is_moved(source, use)
        if not as_known or around not in source.around(use):
            raise FixRefused(f"line {use.lineno} uses `{name}` in another way")
    if (times := sum(map(is_stored, uses))) != 1:
        raise FixRefused(f"`self.{name}` is assigned in {times} places")


def _is_moved(source: SourceFile, node: ast.Attribute) -> bool:
    outer = source.parents[node]
    call = source.parents[outer]
    method = isinstance(outer, ast.Attribute) and outer.attr in ("to", "cuda")
    return method and isinstance(call, ast.Call) and call.func is outer


def _is_assigned(source: SourceFile, node: ast.Attribute) -> bool:
    """Return True if `__init__` assigns the attribute its own value, by a call."""
    function, assign = source.function(node), source.parents[node]
    return (
        isinstance(function, ast.FunctionDef)
        and function.name == "__init__"
        and isinstance(assign, ast.Assign)
        and len(assign.targets) == 1
        and isinstance(assign.value, ast.Call | ast.BinOp)
    )


def _is_read(source: SourceFile, node: ast.Call) -> bool:
    outer = source.parents[node]
    function = source.function(node)
    if isinstance(outer, ast.Assign) and len(outer.targets) == 1 and isinstance(function, Function):
        name = assigned_name(outer)
        return (
            name is not None
            and is_private(source, function, name)
            and len(stores(function, name)) == 1
            and all(only_reads(source, use) for use in loads(function, name))
        )
    if isinstance(outer, ast.Subscript) and outer.value is node:
        return only_reads_at(source, outer)
    return only_reads_at(source, node)


MOVED_CONSTANT: Fix = Fix(
    name="moved_constant",
    doc="""`self.table.to(device)` in each call is moved once, and kept.

    A module's constant that is neither a parameter nor a buffer stays on the host when the module is moved,
    so each call copies it, and waits. The copy replaces the constant: `table = self.table =
    self.table.to(device)`, which copies nothing the next time. The code uses the local name, so a thread that
    needs another device does not interfere.

    Applies if the class assigns the attribute once, uses it in no other way, and only reads the copy. Refused
    for parameters and buffers, and if the file pickles or copies modules, since the copy would be included.
    Better, if the module is yours: `self.register_buffer("table", table, persistent=False)`.
    """,
    codes=("TT103",),
    equivalence="BITWISE",
    find=_moves,
    write=_kept,
)


FIXES = (HOISTED_CONSTANT, MOVED_CONSTANT)
