"""`weights = torch.tensor([0.1, 0.9], device=d)` in a loop is made once, before it.

Each turn makes the same tensor on the host and copies it, and the host waits each time. The tensor is a
constant: numbers that are written there, on a device that the loop does not change.

Refused where it has another value in some turn, may be written to, or is kept by something that lives on.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

from torchtrim.rewriter.fix import Edit, Fix, Match, Writing
from torchtrim.rewriter.replace import check_comments
from torchtrim.source.facts import Facts, Refused
from torchtrim.source.names import is_private, only_reads
from torchtrim.source.purity import is_simple
from torchtrim.source.source import Function, Source
from torchtrim.source.uploads import need_device, uploads
from torchtrim.source.uses import loads, stores

_MAKERS = frozenset(("tensor", "as_tensor"))


def find(source: Source) -> Iterator[Match]:
    """Constants that a loop assigns to a name in each turn."""
    for upload in uploads(source, _MAKERS):
        assign = source.parents[upload.whole]
        loop = source.loop(upload.whole)
        if upload.between or upload.device is None or not isinstance(assign, ast.Assign):
            continue
        if loop is not None and assign in loop.body and _is_literal(upload.made):
            yield Match(fix=FIX, source=source, node=assign, parts={"D": upload.device})


def _is_literal(made: ast.Call) -> bool:
    if len(made.args) != 1 or any(word.arg in ("requires_grad", None) for word in made.keywords):
        return False
    try:
        ast.literal_eval(made.args[0])
    except (ValueError, TypeError):
        return False
    return True


def write(match: Match, facts: Facts) -> Writing:
    """The assignment before the loop."""
    source, assign = match.source, match.node
    assert isinstance(assign, ast.Assign)
    loop = source.loop(assign)
    assert loop is not None
    name = _name(source, assign)
    need_device(facts, match.text("D"))
    _check(source, loop, assign, match.parts["D"], name)
    blanks = source.indentation(loop)
    if blanks is None or source.indentation(assign) is None or len(loop.body) == 1:
        raise Refused(
            "the loop or the assignment shares its line, or there is nothing else in the loop"
        )
    start, end = source.line_start(assign.lineno), _next_line(source, assign)
    before = source.line_start(loop.lineno)
    text = f"{blanks}{source.segment(assign)}{source.newline}"
    edits = (Edit(before, before, text), Edit(start, end, ""))
    check_comments(source, edits)
    return Writing(edits)


def _next_line(source: Source, assign: ast.Assign) -> int:
    end = source.end(assign)
    stop = source.text.find("\n", end)
    if stop < 0 or source.text[end:stop].strip():
        raise Refused("something follows it in its line")
    return stop + 1


def _name(source: Source, assign: ast.Assign) -> str:
    target = assign.targets[0]
    function = source.function(assign)
    if len(assign.targets) > 1 or not isinstance(target, ast.Name):
        raise Refused("it is assigned to more than a name")
    if not isinstance(function, Function) or not is_private(source, function, target.id):
        raise Refused(f"`{target.id}` is seen outside of the function")
    if len(stores(function, target.id)) > 1:
        raise Refused(f"`{target.id}` is given another value too")
    return target.id


def _check(source: Source, loop: ast.AST, assign: ast.Assign, device: ast.expr, name: str) -> None:
    function = source.function(assign)
    if not all(only_reads(source, use) for use in loads(function, name)):
        raise Refused(f"`{name}` may be written to, or kept")
    if assign.lineno != assign.end_lineno:
        raise Refused("it is written in several lines")
    inside = {id(one) for one in ast.walk(loop)}
    if any(id(use) not in inside for use in loads(function, name)):
        raise Refused(f"`{name}` is read behind the loop, which may have had no turn")
    names = {one.id for one in ast.walk(device) if isinstance(one, ast.Name)}
    changed = {
        one.id
        for one in ast.walk(loop)
        if isinstance(one, ast.Name) and not isinstance(one.ctx, ast.Load)
    }
    if not is_simple(device) or names & changed:
        raise Refused("the device may be another in each turn")


FIX: Fix = Fix(codes=("TT103",), equivalence="BITWISE", find=find, write=write)
