"""Several reads of scalars, in one copy."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from torchtrim.records.probes import ObservedValue
from torchtrim.rewriter.fix import Fix, Match, TextEdit, Writing, of_forms
from torchtrim.rewriter.guarded import check_bound, names_tested, with_names
from torchtrim.rewriter.reads import is_count
from torchtrim.rewriter.replace import (
    atom,
    check_comments,
    fresh,
    insert_before,
    replace,
    runs_first,
    torch_of,
)
from torchtrim.source.facts import (
    Facts,
    FixRefused,
    Values,
    is_floating,
    is_integral,
    is_tensor,
    need_tensor,
    of_part,
)
from torchtrim.source.forms import equal
from torchtrim.source.names import literal_stores, stores
from torchtrim.source.operations import is_pure
from torchtrim.source.source import SourceFile
from torchtrim.source.transfers import READS, Read, has_own_text, is_single, reads_in

_SIMPLE = (ast.Assign, ast.AugAssign, ast.AnnAssign, ast.Expr, ast.Return)
_DICTS = ("dict", "defaultdict", "OrderedDict")
_FACT = "the reads are of one-element tensors, on one device and with compatible types"


def _find(source: SourceFile) -> Iterator[Match]:
    return with_names(_find_runs)(source)


def _find_runs(source: SourceFile) -> Iterator[Match]:
    reading = {source.statement(one) for one in source.at((ast.Call, name) for name in READS)}
    for node in source.nodes if reading else ():
        for name in ("body", "orelse", "finalbody"):
            block = getattr(node, name, None)
            if isinstance(block, list) and not reading.isdisjoint(block):
                yield from _runs(source, block)


def _runs(source: SourceFile, block: Sequence[ast.stmt]) -> Iterator[Match]:
    run: list[ast.stmt] = []
    for statement in block:
        if run and not (_is_quiet(source, run[-1]) and _is_free(source, statement, run)):
            yield from _match(source, run)
            run = []
        if isinstance(statement, (*_SIMPLE, ast.If)) and (run or _reads(source, statement)):
            run.append(statement)
    yield from _match(source, run)


def _match(source: SourceFile, run: list[ast.stmt]) -> Iterator[Match]:
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
    yield Match(fix=COALESCED_READS, source=source, node=last, parts=parts, begin=run[0])


def _reads(source: SourceFile, statement: ast.stmt) -> list[Read]:
    top: ast.AST = statement.test if isinstance(statement, ast.If) else statement
    return [
        read
        for read in reads_in(top, source)
        if is_pure(read.tensor, source)
        and not any(True for _ in reads_in(read.tensor, source))
        and runs_first(source, read.node)
        and has_own_text(source, read.node)
    ]


def _is_quiet(source: SourceFile, statement: ast.stmt) -> bool:
    """Return True if the statement only assigns to the function's own names or to dictionary keys."""
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


def _is_free(source: SourceFile, statement: ast.stmt, run: Sequence[ast.stmt]) -> bool:
    """Return True if its reads do not depend on what the run of statements assigns, so that it may join
    it.
    """
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


def _is_keyed(source: SourceFile, node: ast.Name) -> bool:
    outer = source.parents[node]
    return isinstance(outer, ast.Subscript) and isinstance(outer.ctx, ast.Store)


def _is_tried(source: SourceFile, statement: ast.stmt) -> bool:
    return isinstance(source.parents[statement], ast.Try)


def _write_coalesced_reads(match: Match, facts: Facts) -> Writing:
    source = match.source
    for part in match.parts:
        if part.startswith("D"):
            facts.need(
                f"`{match.text(part)}` is a dictionary",
                of_part(part, lambda seen: seen.kind in _DICTS),
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
    """Return the numbers of the reads to combine, and the cast they need."""
    if not facts.seen:
        for n in range(len(reads)):
            need_tensor(facts, f"L{n}", match.text(f"L{n}"))
        if len({_static_types(facts, f"L{n}") for n in range(len(reads))}) > 1:
            raise FixRefused(
                "some of its reads are of integers or booleans, others may not be, and one read "
                "gives all of them one type. Read each separately"
            )
        facts.leave_open(_FACT)
        return list(range(len(reads))), ""
    seen = [_kind(facts, f"L{n}") for n in range(len(reads))]
    devices = Counter(one.device for one in seen if one is not None)
    if not devices:
        raise FixRefused("it reads a value that is not a one-element tensor")
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
        raise FixRefused(
            "its reads have incompatible types: a 64-bit integer may be too large to be exact as a "
            "float. Read them late, when the device is done"
        )
    return wide, cast


def _static_types(facts: Facts, part: str) -> tuple[bool, ...]:
    boolean = facts.holds_statically(of_part(part, lambda seen: seen.dtype == "bool"))
    integer = facts.holds_statically(of_part(part, lambda seen: seen.dtype == "int64"))
    return boolean is True, integer is True


def _kind(facts: Facts, part: str) -> ObservedValue | None:
    """Return what a part was in all executions, or None if it was not a tensor of one number, or differed."""
    found = {
        (one.dtype, one.device): one
        for values in facts.executions
        if (one := getattr(values, part, None)) is not None and is_single(one)
    }
    shown = all(
        is_single(getattr(values, part, ObservedValue(kind=""))) for values in facts.executions
    )
    return next(iter(found.values())) if len(found) == 1 and shown else None


def _fits_double(match: Match, read: Read, seen: ObservedValue | None) -> bool:
    if seen is None or not seen.device.startswith(("cpu", "cuda")):
        return False
    if is_floating(seen):
        return True
    return is_integral(seen) and (
        seen.dtype != "int64" or is_count(_made(match.source, read.tensor))
    )


def _made(source: SourceFile, node: ast.expr) -> ast.expr:
    """Return the single expression assigned to a name, or None."""
    if isinstance(node, ast.Name):
        found = [source.parents[one] for one in stores(source.function(node), node.id)]
        if len(found) == 1 and isinstance(found[0], ast.Assign) and len(found[0].targets) == 1:
            return found[0].value
    return node


def _edits(
    match: Match, facts: Facts, reads: Sequence[tuple[str, Read]], cast: str
) -> tuple[TextEdit, ...]:
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
    """A tensor to read, the name and text of its value, and the conversion to the type that was read."""

    name: str
    tensor: ast.expr
    text: str
    kind: str


def _lines(source: SourceFile, torch: str, groups: Sequence[_Group], test: str) -> str:
    """Return the combined read; if the test fails, each tensor is read separately."""
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
    """Return the statement to insert the read before: the first remaining one."""
    return reads[0][1].node


def _name(source: SourceFile, read: Read, taken: Sequence[str]) -> str:
    words = re.findall(r"[A-Za-z_]\w*", ast.unparse(read.tensor))
    known = [word for word in words if word not in ("self", "torch", "sum", "mean", "cls")]
    base = fresh(source, read.node, f"{(known or ['value'])[0]}_read")
    return next(
        new
        for number in range(1, 10**6)
        if (new := base if number == 1 else f"{base}_{number}") not in taken
    )


def _text(source: SourceFile, facts: Facts, part: str, read: Read, cast: str) -> str:
    flat = facts.holds(lambda v: not getattr(v, part).shape)
    bare = source.segment(read.tensor)
    if flat and not cast:
        return bare if not isinstance(read.tensor, ast.Tuple | ast.Starred) else f"({bare})"
    return atom(source, read.tensor) + ("" if flat else ".reshape(())") + cast


def _kind_read(facts: Facts, part: str, cast: str) -> str:
    """Return the conversion of a float, as which the value was read with others, to its own type."""
    if not cast:
        return ""
    truth = facts.holds(lambda v: getattr(v, part).dtype == "bool")
    integral = facts.holds(lambda v: is_integral(getattr(v, part)))
    return "bool" if truth else "int" if integral else ""


def _value(source: SourceFile, read: Read, name: str) -> TextEdit:
    text = f"{read.cast}({name})" if read.cast else name
    return TextEdit(source.start(read.node), source.end(read.node), text)


COALESCED_READS: Fix = Fix(
    name="coalesced_reads",
    doc="""Adjacent reads, `a.item()` and `b.item()`, become one read of both.

    Each read is a host-device sync that copies one number. Stacked, they need one copy: `a_read, b_read =
    torch.stack((a, b)).tolist()`. They may be in one statement, as arguments, in a dictionary or an f-string,
    or in consecutive statements with no side effect in between. The numbers are the same, since a Python
    number holds each value exactly; floats are read together with counts in 64 bits.

    The replacement tests for the observed types, which needs no sync; others are read one by one. The values
    are assumed to be real numbers, as in the observed run. Refused if fewer than two are on one device with
    compatible types.
    """,
    codes=("TT101",),
    equivalence="BITWISE",
    find=_find,
    write=_write_coalesced_reads,
)


_LIST = "torch.stack(tuple(X)).tolist() if X else []"
_CAST_LIST = "list(map(CAST, torch.stack(tuple(X)).tolist())) if X else []"
_DICT = "dict(zip(X, torch.stack(tuple(X.values())).tolist())) if X else {}"
_CAST_DICT = "dict(zip(X, map(CAST, torch.stack(tuple(X.values())).tolist()))) if X else {}"
_READS = (
    "V.item()",
    "V.detach().item()",
    "V.detach().cpu().item()",
    "V.cpu().item()",
    "float(V)",
    "int(V)",
)
_FORMS = {f"[{read} for V in X]": _LIST for read in _READS} | {
    f"{{K: {read} for K, V in X.items()}}": _DICT for read in _READS
}


def _write_collected_reads(match: Match, facts: Facts) -> Writing:
    template = _FORMS[match.form]
    cast = next((one for one in ("float", "int") if f"{one}(V)" in match.form), "")
    kinds = ("list", "tuple") if template is _LIST else ("dict",)
    if cast:
        template = (_CAST_LIST if template is _LIST else _CAST_DICT).replace("CAST", cast)
    facts.need(
        f"`{match.text('X')[:60]}` is a {kinds[0]} of tensors of zero dimensions",
        lambda v: (not hasattr(v, "X") or v.X.kind in kinds) and _is_scalar(v),
    )
    seen = {(v.V.dtype, v.V.device) for v in facts.executions if hasattr(v, "V")}
    if len(seen) > 1:
        raise FixRefused("it reads several types or devices")
    if not seen:
        facts.leave_open("they are tensors of zero dimensions")
    if "float(V)" in match.form:
        facts.need("they contain floats", lambda v: not hasattr(v, "V") or is_floating(v.V))
    if "int(V)" in match.form:
        facts.need("they contain integers", _is_whole)
    return Writing(replace(match, template, {"X": "read"}))


def _is_scalar(values: Values) -> bool:
    """Return True for a tensor of zero dimensions, or if this execution observed no element."""
    return not hasattr(values, "V") or (is_tensor(values.V) and not values.V.shape)


def _is_whole(values: Values) -> bool:
    return not hasattr(values, "V") or (is_integral(values.V) and values.V.dtype != "bool")


COLLECTED_READS: Fix = Fix(
    name="collected_reads",
    doc="""`[v.item() for v in losses]` and `{k: v.item() for k, v in losses.items()}` become one read.

    Each element is read separately, and waits. Stacked, they need one copy. An empty container stays empty.

    Needs tensors of zero dimensions, all of one type and device. The values that are read are assumed to be
    real numbers, as in the observed run.
    """,
    codes=("TT101",),
    equivalence="BITWISE",
    find=of_forms(lambda: COLLECTED_READS, *_FORMS),
    write=_write_collected_reads,
)


FIXES = (COALESCED_READS, COLLECTED_READS)
