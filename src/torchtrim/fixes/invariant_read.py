"""`mask.sum(1).tolist()` and `sizes[i].tolist()` in a loop are read once, before they are first needed.

A read in a loop waits each time round. Where its tensor stays the same throughout the loop, one read is
enough; where it is a row of one, the whole is read once and the row is taken on the host. It is read when
it is first needed, so a loop that runs zero times reads nothing, as before. Lists are given out as copies,
since what gets one may change it.

Holds where nothing in the loop can write to the tensor: it has one name, through which it is only read, or
the loop calls nothing but known functions. Otherwise it is suggested: a function that is called might.

Values that are read count as real numbers, as in the run that was watched.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from torchtrim.rewriter.fix import Edit, Fix, Match, Writing
from torchtrim.rewriter.guarded import names_tested, with_names
from torchtrim.rewriter.replace import atom, check_comments, fresh, insert_before
from torchtrim.source.facts import Facts, Refused, need_tensor
from torchtrim.source.loops import keeps, loops_around
from torchtrim.source.purity import is_pure
from torchtrim.source.reads import bare, is_whole, read_of, reads_in
from torchtrim.source.source import Loop, Source


def _find(source: Source) -> Iterator[Match]:
    for node in source.at(
        {(ast.Call, "tolist"), (ast.Call, "item"), (ast.Call, "int"), (ast.Call, "float")}
    ):
        assert isinstance(node, ast.Call)
        tensor = _tensor(source, node)
        if tensor is None or not is_pure(tensor, source) or _is_guarded(source, node):
            continue
        parts = _parts(source, node, tensor)
        if parts is not None:
            yield Match(fix=FIX, source=source, node=node, parts=parts)


def find(source: Source) -> Iterator[Match]:
    """Reads in a loop, of what the loop does not bind."""
    return with_names(_find)(source)


def _tensor(source: Source, node: ast.Call) -> ast.expr | None:
    if any(
        True for one in node.args for _ in reads_in(one, source) if read_of(node, source) is None
    ):
        return None
    if isinstance(node.func, ast.Attribute) and node.func.attr == "tolist" and not node.args:
        return bare(node.func.value)
    read = read_of(node, source)
    inner = read is not None and read_of(source.parents[node], source) is not None
    return read.tensor if read is not None and not inner else None


def _parts(source: Source, node: ast.Call, tensor: ast.expr) -> dict[str, ast.expr] | None:
    """The tensor, or the whole and the indices of a row of it."""
    loop = source.loop(node)
    if loop is None or (isinstance(loop, ast.For) and _within(node, loop.iter)):
        return None
    if not _bound(tensor, loop):
        return {"X": tensor}
    if isinstance(tensor, ast.Subscript) and not _bound(tensor.value, loop):
        found = tensor.slice.elts if isinstance(tensor.slice, ast.Tuple) else [tensor.slice]
        if not any(isinstance(one, ast.Slice | ast.Starred) for one in found):
            return {"X": tensor.value, **{f"I{n}": one for n, one in enumerate(found)}}
    return None


def _bound(node: ast.expr, loop: Loop) -> bool:
    names = {one.id for one in ast.walk(node) if isinstance(one, ast.Name)}
    return any(
        isinstance(one, ast.Name) and one.id in names and not isinstance(one.ctx, ast.Load)
        for one in ast.walk(loop)
    )


def _is_guarded(source: Source, node: ast.AST) -> bool:
    """Whether it is already read only where it has not been."""
    assign, outer = source.statement(node), source.parents[source.statement(node)]
    return (
        isinstance(assign, ast.Assign)
        and isinstance(outer, ast.If)
        and ast.unparse(outer.test) == f"{ast.unparse(assign.targets[0])} is None"
    )


def write(match: Match, facts: Facts) -> Writing:
    """The read where it is first needed, and its value."""
    node = match.node
    assert isinstance(node, ast.Call)
    indices = [name for name in match.parts if name.startswith("I")]
    need_tensor(facts, "X", match.text("X"))
    for part in indices:
        facts.need(
            f"`{match.text(part)[:60]}` is an integer of Python's",
            lambda v, part=part: getattr(v, part).kind == "int",  # type: ignore[misc]
        )
    rank = facts.only("the number of dimensions", lambda v: len(v.X.shape), len(indices) or 1)
    left = rank - len(indices)
    listed = isinstance(node.func, ast.Attribute) and node.func.attr == "tolist"
    if left < 0 or left > (1 if listed else 0):
        raise Refused(
            "what is read is a list of lists, or a tensor of one element and more dimensions"
        )
    loop, risk = _widest(match)
    test, imports, _ = names_tested(match, facts, ["X"]) if listed else ("", (), [])
    copied = listed and left == 1
    edits = _edits(match, loop, indices, copied=copied, test=test, scalar=not listed)
    return Writing((*imports, *edits), risk)


def _widest(match: Match) -> tuple[Loop, str]:
    """The outermost loop throughout which the tensor stays; the innermost, and what may differ, if none."""
    source, tensor = match.source, match.parts["X"]
    found = None
    for loop in loops_around(source, match.node):
        if _bound(tensor, loop) or not keeps(source, loop, tensor):
            break
        found = loop
    if found is not None:
        return found, ""
    inner = source.loop(match.node)
    assert inner is not None
    return inner, f"something that is called in the loop might write to `{match.text('X')[:60]}`"


def _edits(
    match: Match, loop: Loop, indices: list[str], *, copied: bool, test: str, scalar: bool
) -> tuple[Edit, ...]:
    """The read, and its value. `copied`: that is a list. `test`: where this does not hold the tensor is read
    as it was. `scalar`: a number is read, whatever dimensions of one element there are besides."""
    source, node, tensor = match.source, match.node, match.parts["X"]
    assert isinstance(node, ast.Call)
    if not is_whole(source, node):
        raise Refused("it is in a text. Give it a name before")
    blanks = source.indentation(loop)
    if blanks is None:
        raise Refused("the loop shares its line with another statement. Give each its own line")
    words = re.findall(r"[A-Za-z_]\w*", ast.unparse(tensor))
    base = next((word for word in words if word not in ("self", "torch")), "value")
    name = fresh(source, node, f"{base}_read")
    value = name + "".join(f"[{match.text(part)}]" for part in indices)
    if copied and not _is_unpacked(source, node):
        value = f"list({value})"
    read = read_of(node, source)
    if read is not None and read.cast:
        value = f"{read.cast}({value})"
    if test:
        whole = f"{value} if {test} else {source.segment(node)}"
        value = whole if isinstance(source.parents[node], ast.Assign | ast.Return) else f"({whole})"
    start = source.line_start(loop.lineno)
    text = _joined(atom(source, tensor))
    shaped = f".reshape({text}.shape[:{len(indices)}])" if scalar else ""
    once = f"if {name} is None:\n    {name} = {text}{shaped}.tolist()"
    edits = (
        Edit(start, start, f"{blanks}{name} = None{source.newline}"),
        insert_before(source, node, once),
        Edit(source.start(node), source.end(node), value),
    )
    check_comments(source, edits)
    return edits


def _joined(text: str) -> str:
    return " ".join(part.strip() for part in text.splitlines())


def _is_unpacked(source: Source, node: ast.AST) -> bool:
    outer = source.parents[node]
    return isinstance(outer, ast.Assign) and all(
        isinstance(target, ast.Tuple | ast.List) for target in outer.targets
    )


def _within(node: ast.AST, around: ast.AST) -> bool:
    return any(one is node for one in ast.walk(around))


FIX = Fix(codes=("TT101",), equivalence="BITWISE", find=find, write=write)
