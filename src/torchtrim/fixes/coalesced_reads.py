"""Several reads that stand together, `a.item()` and `b.item()`, become one read of both.

Each read is a host-device sync that copies one number. Stacked, they come in one copy:
`a_read, b_read = torch.stack((a, b)).tolist()`. They may stand in one statement, as arguments, in a
dictionary or an f-string, or in statements that follow each other, where nothing between has an effect.
The numbers are the same, since a Python number holds each value exactly; floats are read together with
counts in 64 bits.

Types that were seen are tested for, which needs no sync; others are read one by one. What is read is taken to
be real, as in the run that was watched. Refused where fewer than two are of one device and of types that go
together.
"""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from torchtrim.records.seen import Seen
from torchtrim.rewriter.deferred import is_count
from torchtrim.rewriter.fix import Edit, Fix, Match, Writing
from torchtrim.rewriter.guarded import check_bound, names_tested, with_names
from torchtrim.rewriter.replace import (
    atom,
    check_comments,
    fresh,
    insert_before,
    runs_first,
    torch_of,
)
from torchtrim.source.facts import Facts, Refused, is_floating, is_integral, need_tensor
from torchtrim.source.forms import equal
from torchtrim.source.names import literal_stores
from torchtrim.source.purity import is_pure
from torchtrim.source.reads import READS, Read, is_single, is_whole, reads_in
from torchtrim.source.source import Source
from torchtrim.source.uses import stores

_SIMPLE = (ast.Assign, ast.AugAssign, ast.AnnAssign, ast.Expr, ast.Return)
_DICTS = ("dict", "defaultdict", "OrderedDict")
_FACT = "what is read are tensors of one number, on one device and of types that go together"


def find(source: Source) -> Iterator[Match]:
    """Each run of statements with two reads or more."""
    return with_names(_find)(source)


def _find(source: Source) -> Iterator[Match]:
    reading = {source.statement(one) for one in source.at((ast.Call, name) for name in READS)}
    for node in source.nodes if reading else ():
        for name in ("body", "orelse", "finalbody"):
            block = getattr(node, name, None)
            if isinstance(block, list) and not reading.isdisjoint(block):
                yield from _runs(source, block)


def _runs(source: Source, block: Sequence[ast.stmt]) -> Iterator[Match]:
    run: list[ast.stmt] = []
    for statement in block:
        if run and not (_is_quiet(source, run[-1]) and _is_free(source, statement, run)):
            yield from _match(source, run)
            run = []
        if isinstance(statement, (*_SIMPLE, ast.If)) and (run or _reads(source, statement)):
            run.append(statement)
    yield from _match(source, run)


def _match(source: Source, run: list[ast.stmt]) -> Iterator[Match]:
    while run and not _reads(source, run[-1]):
        run.pop()
    reads = [read for statement in run for read in _reads(source, statement)]
    if len(reads) < 2:
        return
    parts = {f"L{n}": read.tensor for n, read in enumerate(reads)}
    for number, statement in enumerate(run[:-1]):
        target = statement.targets[0] if isinstance(statement, ast.Assign) else None
        if isinstance(target, ast.Subscript):
            parts[f"D{number}"] = target.value
    last = reads[-1].node if isinstance(run[-1], ast.If) else run[-1]
    yield Match(fix=FIX, source=source, node=last, parts=parts, begin=run[0])


def _reads(source: Source, statement: ast.stmt) -> list[Read]:
    """The reads of a statement that may as well run before it."""
    top: ast.AST = statement.test if isinstance(statement, ast.If) else statement
    return [
        read
        for read in reads_in(top, source)
        if is_pure(read.tensor, source)
        and not any(True for _ in reads_in(read.tensor, source))
        and runs_first(source, read.node)
        and is_whole(source, read.node)
    ]


def _is_quiet(source: Source, statement: ast.stmt) -> bool:
    """Whether it only gives values to names of the function, or to a key of a dictionary."""
    if isinstance(statement, ast.AugAssign):
        target = statement.target
        return (
            isinstance(target, ast.Name)
            and is_pure(statement.value, source)
            and bool(literal_stores(source, source.function(statement), target.id))
        )
    if not isinstance(statement, ast.Assign) or len(statement.targets) != 1:
        return False
    target_ = statement.targets[0]
    keyed = (
        isinstance(target_, ast.Subscript)
        and isinstance(target_.value, ast.Name)
        and isinstance(target_.slice, ast.Constant)
    )
    return (isinstance(target_, ast.Name) or keyed) and is_pure(statement.value, source)


def _is_free(source: Source, statement: ast.stmt, run: Sequence[ast.stmt]) -> bool:
    """Whether what it reads does not depend on what the run assigns, and it may join the run."""
    if not isinstance(statement, (*_SIMPLE, ast.If)) or _is_tried(source, statement):
        return False
    assigned = {
        node.id
        for one in run
        for node in ast.walk(one)
        if isinstance(node, ast.Name)
        and (not isinstance(node.ctx, ast.Load) or _is_keyed(source, node))
    }
    used = {
        node.id
        for read in _reads(source, statement)
        for node in ast.walk(read.tensor)
        if isinstance(node, ast.Name)
    }
    return not assigned & used


def _is_keyed(source: Source, node: ast.Name) -> bool:
    outer = source.parents[node]
    return isinstance(outer, ast.Subscript) and isinstance(outer.ctx, ast.Store)


def _is_tried(source: Source, statement: ast.stmt) -> bool:
    return isinstance(source.parents[statement], ast.Try)


def write(match: Match, facts: Facts) -> Writing:
    """One read for those that go together."""
    source = match.source
    for part in match.parts:
        if part.startswith("D"):
            facts.need(
                f"`{match.text(part)}` is a dictionary",
                lambda v, part=part: getattr(v, part).kind in _DICTS,  # type: ignore[misc]
            )
    reads = _run_of(match)
    chosen, cast = _together(match, facts, reads)
    edits = _edits(match, facts, [(f"L{n}", reads[n]) for n in chosen], cast)
    check_comments(source, edits)
    return Writing(edits)


def _run_of(match: Match) -> list[Read]:
    tensors = {id(node) for name, node in match.parts.items() if name.startswith("L")}
    source, statement = match.source, match.begin
    assert isinstance(statement, ast.stmt)
    found = []
    for one in source.block(statement):
        if one.lineno >= statement.lineno:
            found += (
                [read for read in _reads(source, one) if id(read.tensor) in tensors]
                if (isinstance(one, (*_SIMPLE, ast.If)))
                else []
            )
    return found


def _together(match: Match, facts: Facts, reads: Sequence[Read]) -> tuple[list[int], str]:
    """The numbers of the reads to be made one, and the cast that they need for it."""
    if not facts.seen:
        for n in range(len(reads)):
            need_tensor(facts, f"L{n}", match.text(f"L{n}"))
        if len({_told_types(facts, f"L{n}") for n in range(len(reads))}) > 1:
            raise Refused(
                "some of its reads are of whole numbers or truth values, others may not be, and one read "
                "gives all of them one type. Read each by itself"
            )
        facts.leave_open(_FACT)
        return list(range(len(reads))), ""
    seen = [_kind(facts, f"L{n}") for n in range(len(reads))]
    devices = Counter(one.device for one in seen if one is not None)
    if not devices:
        raise Refused("what is read is no tensor of one number")
    device = devices.most_common(1)[0][0]
    there = [n for n, one in enumerate(seen) if one is not None and one.device == device]
    types = Counter(seen[n].dtype for n in there)  # type: ignore[union-attr]
    wide = [n for n in there if _fits_double(match, reads[n], seen[n])]
    dtype, count = types.most_common(1)[0]
    if count >= len(wide):
        wide, cast = [n for n in there if seen[n].dtype == dtype], ""  # type: ignore[union-attr]
    else:
        cast = ".double()"
    if len(wide) < 2:
        raise Refused(
            "its reads are of types that do not go together: an integer of 64 bits may be larger than a "
            "float holds exactly. Read them late, when the device is done"
        )
    return wide, cast


def _told_types(facts: Facts, part: str) -> tuple[bool, ...]:
    """Whether the source says that a part is of truth values, and of integers."""
    return tuple(
        facts.is_told(lambda v, dtype=dtype: getattr(v, part).dtype == dtype) is True  # type: ignore[misc]
        for dtype in ("bool", "int64")
    )


def _kind(facts: Facts, part: str) -> Seen | None:
    """What a part was in all executions; None where it was no tensor of one number, or differed."""
    found = {
        (one.dtype, one.device): one
        for values in facts.executions
        if (one := getattr(values, part, None)) is not None and is_single(one)
    }
    shown = all(is_single(getattr(values, part, Seen(kind=""))) for values in facts.executions)
    return next(iter(found.values())) if len(found) == 1 and shown else None


def _fits_double(match: Match, read: Read, seen: Seen | None) -> bool:
    if seen is None or not seen.device.startswith(("cpu", "cuda")):
        return False
    if is_floating(seen):
        return True
    return is_integral(seen) and (
        seen.dtype != "int64" or is_count(_made(match.source, read.tensor))
    )


def _made(source: Source, node: ast.expr) -> ast.expr:
    """What a name was given, where that is one expression."""
    if isinstance(node, ast.Name):
        found = [source.parents[one] for one in stores(source.function(node), node.id)]
        if len(found) == 1 and isinstance(found[0], ast.Assign) and len(found[0].targets) == 1:
            return found[0].value
    return node


def _edits(
    match: Match, facts: Facts, reads: Sequence[tuple[str, Read]], cast: str
) -> tuple[Edit, ...]:
    source = match.source
    torch, imports = torch_of(source)
    groups: list[_Group] = []
    edits = [*imports]
    for part, read in reads:
        same = [one for one in groups if equal(one.tensor, read.tensor)]
        if not same:
            name = _name(source, read, [one.name for one in groups])
            text = _text(source, facts, part, read, cast)
            same = [_Group(name, read.tensor, text, _kind_read(facts, part, cast))]
            groups += same
        edits.append(_value(source, read, same[0].name))
    test, _, nodes = names_tested(match, facts, [part for part, _ in reads])
    check_bound(match, nodes, reads[0][1].node)
    lines = _lines(source, torch, groups, test)
    edits.append(insert_before(source, _first(match, reads), lines))
    return tuple(edits)


class _Group(NamedTuple):
    """A tensor that is read, the name of its value, how it is written, and what makes it the type that was
    read."""

    name: str
    tensor: ast.expr
    text: str
    kind: str


def _lines(source: Source, torch: str, groups: Sequence[_Group], test: str) -> str:
    """The one read; where the test does not hold, each on its own."""
    names = ", ".join(one.name for one in groups)
    single = [f"{atom(source, one.tensor)}.item()" for one in groups]
    if len(groups) == 1:
        return f"{names} = {single[0]}"
    together = f"{names} = {torch}.stack(({', '.join(one.text for one in groups)})).tolist()"
    made = [f"{one.name} = {one.kind}({one.name})" for one in groups if one.kind]
    if not test:
        return "\n".join([together, *made])
    inside = [f"    {line}" for line in (together, *made)]
    return "\n".join([f"if {test}:", *inside, "else:", f"    {names} = {', '.join(single)}"])


def _first(match: Match, reads: Sequence[tuple[str, Read]]) -> ast.AST:
    """The place before which the read is put: the first statement of those that are left."""
    return reads[0][1].node


def _name(source: Source, read: Read, taken: Sequence[str]) -> str:
    words = re.findall(r"[A-Za-z_]\w*", ast.unparse(read.tensor))
    known = [word for word in words if word not in ("self", "torch", "sum", "mean", "cls")]
    base = fresh(source, read.node, f"{(known or ['value'])[0]}_read")
    return next(
        new
        for number in range(1, 10**6)
        if (new := base if number == 1 else f"{base}_{number}") not in taken
    )


def _text(source: Source, facts: Facts, part: str, read: Read, cast: str) -> str:
    flat = facts.holds(lambda v: not getattr(v, part).shape)
    bare = source.segment(read.tensor)
    if flat and not cast:
        return bare if not isinstance(read.tensor, ast.Tuple | ast.Starred) else f"({bare})"
    return atom(source, read.tensor) + ("" if flat else ".reshape(())") + cast


def _kind_read(facts: Facts, part: str, cast: str) -> str:
    """What makes a float, as which it was read with others, the type that it has alone."""
    if not cast:
        return ""
    truth = facts.holds(lambda v: getattr(v, part).dtype == "bool")
    integral = facts.holds(lambda v: is_integral(getattr(v, part)))
    return "bool" if truth else "int" if integral else ""


def _value(source: Source, read: Read, name: str) -> Edit:
    """The name in the place of the read, with its cast."""
    text = f"{read.cast}({name})" if read.cast else name
    return Edit(source.start(read.node), source.end(read.node), text)


FIX = Fix(codes=("TT101",), equivalence="BITWISE", find=find, write=write)
