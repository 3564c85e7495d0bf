"""Several reads of scalars, in one copy."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from torchtrim.records.probes import ObservedValue
from torchtrim.rewriter.fix import Fix, Match, TextEdit, Writing, comments, of_forms
from torchtrim.rewriter.layout import width_of
from torchtrim.rewriter.reads import is_count, name_of
from torchtrim.rewriter.replace import (
    atom,
    insert_before,
    replace,
    runs_first,
    torch_of,
)
from torchtrim.source.facts import (
    Facts,
    FixRefused,
    is_floating,
    is_integral,
    is_tensor,
    of_part,
)
from torchtrim.source.forms import equal
from torchtrim.source.names import literal_stores, stores
from torchtrim.source.nodes import find_all, names_bound, names_in
from torchtrim.source.operations import is_pure
from torchtrim.source.source import SourceFile
from torchtrim.source.transfers import READS, Read, has_own_text, is_single, reads_in

_SIMPLE = (ast.Assign, ast.AugAssign, ast.AnnAssign, ast.Expr, ast.Return)
_DICTS = ("dict", "defaultdict", "OrderedDict")
_FACT = "the reads are of one-element tensors, on one device and with compatible types"


def _find_runs(source: SourceFile) -> Iterator[Match]:
    reading = {source.statement(call) for call in source.calls(*READS)}
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
        and not list(reads_in(read.tensor, source))
        and runs_first(source, read.node)
        and has_own_text(source, read.node)
    ]


def _is_quiet(source: SourceFile, statement: ast.stmt) -> bool:
    """Return True if the statement only assigns to the function's own names or to dictionary keys."""
    if isinstance(statement, ast.AugAssign):
        name = statement.target.id if isinstance(statement.target, ast.Name) else ""
        counted = literal_stores(source, source.function(statement), name)
        return bool(counted) and is_pure(statement.value, source)
    if not isinstance(statement, ast.Assign) or len(statement.targets) != 1:
        return False
    target = statement.targets[0]
    if isinstance(target, ast.Subscript) and isinstance(target.slice, ast.Constant):
        target = target.value
    return isinstance(target, ast.Name) and is_pure(statement.value, source)


def _is_free(source: SourceFile, statement: ast.stmt, run: Sequence[ast.stmt]) -> bool:
    """Return True if a statement may join the run: its reads do not depend on the run's assignments."""
    tried = isinstance(source.parents[statement], ast.Try)
    if not isinstance(statement, (*_SIMPLE, ast.If)) or tried:
        return False
    used = set().union(*(names_in(read.tensor) for read in _reads(source, statement)))
    keyed = (
        name
        for one in run
        for item in find_all(one, ast.Subscript)
        if isinstance(item.ctx, ast.Store)
        for name in (item.value, item.slice)
    )
    assigned = {name.id for name in keyed if isinstance(name, ast.Name)}
    return not used & assigned.union(*map(names_bound, run))


def _write_coalesced_reads(match: Match, facts: Facts) -> Writing:
    for part in match.parts:
        if part.startswith("D"):
            match.need(facts, part, "is a dictionary", lambda seen: seen.kind in _DICTS)
    reads = _run_of(match)
    chosen, cast = _together(match, facts, reads)
    return Writing(_edits(match, facts, [(f"L{n}", reads[n]) for n in chosen], cast))


def _run_of(match: Match) -> list[Read]:
    tensors = {node for name, node in match.parts.items() if name.startswith("L")}
    source, first = match.source, match.begin
    assert isinstance(first, ast.stmt)
    block = source.block(first)
    return [
        read
        for statement in block[block.index(first) :]
        if isinstance(statement, (*_SIMPLE, ast.If))
        for read in _reads(source, statement)
        if read.tensor in tensors
    ]


def _together(match: Match, facts: Facts, reads: Sequence[Read]) -> tuple[list[int], str]:
    """Return the numbers of the reads to combine, and the cast they need."""
    if not facts.seen:
        for n in range(len(reads)):
            match.need(facts, f"L{n}", "is a tensor", is_tensor, static=True)
        types = {_static_types(match, facts, f"L{n}") for n in range(len(reads))}
        if len(types) > 1:
            raise FixRefused(
                "some of its reads are of integers or booleans, others may not be, and one read "
                "gives all of them one type. Read each separately"
            )
        facts.leave_open(_FACT)
        return list(range(len(reads))), ""
    seen = [_kind(facts, f"L{n}") for n in range(len(reads))]
    if not (devices := Counter(one.device for one in seen if one is not None)):
        raise FixRefused("it reads a value that is not a one-element tensor")
    device = devices.most_common(1)[0][0]
    there = {n: one for n, one in enumerate(seen) if one is not None and one.device == device}
    wide, cast = [n for n, one in there.items() if _fits_double(match, reads[n], one)], ".double()"
    dtype, count = Counter(one.dtype for one in there.values()).most_common(1)[0]
    if count >= len(wide):
        wide, cast = [n for n, one in there.items() if one.dtype == dtype], ""
    if len(wide) < 2:
        raise FixRefused(
            "its reads have incompatible types: a 64-bit integer may be too large to be exact as a "
            "float. Read them late, when the device is done"
        )
    return wide, cast


def _static_types(match: Match, facts: Facts, part: str) -> tuple[bool, ...]:
    boolean = facts.holds_statically(of_part(part, lambda seen: seen.dtype == "bool"))
    integer = facts.holds_statically(of_part(part, lambda seen: seen.dtype == "int64"))
    return boolean is True, integer is True or _sums_counts(match.source, match.parts[part])


def _sums_counts(source: SourceFile, node: ast.expr) -> bool:
    """Return True for a count, and a name that starts as a number and only gets or adds counts."""
    if not isinstance(node, ast.Name):
        return is_count(node)
    outer = [source.parents[one] for one in stores(source.function(node), node.id)]
    values = [getattr(one, "value", None) for one in outer]
    counts = [value for value in values if not isinstance(value, ast.Constant)]
    return bool(counts) and all(isinstance(one, ast.Call) and is_count(one) for one in counts)


def _kind(facts: Facts, part: str) -> ObservedValue | None:
    """Return the value of a part; None if its type or device varied, or it was not a one-element tensor."""
    seen = [getattr(values, part, ObservedValue(kind="")) for values in facts.executions]
    kinds = {(one.dtype, one.device) for one in seen}
    return seen[0] if len(kinds) == 1 and all(map(is_single, seen)) else None


def _fits_double(match: Match, read: Read, seen: ObservedValue) -> bool:
    counted = seen.dtype != "int64" or is_count(_assigned(match.source, read.tensor))
    exact = is_floating(seen) or (is_integral(seen) and counted)
    return exact and seen.device.startswith(("cpu", "cuda"))


def _assigned(source: SourceFile, node: ast.expr) -> ast.expr:
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
    if assigned := _assigned_at_once(source, reads, cast):
        names = ", ".join(source.segment(one.targets[0]) for one in assigned)
        texts = ", ".join(_text(source, facts, part, read, cast) for part, read in reads)
        start, end = source.start(assigned[0]), source.end(assigned[-1])
        return (TextEdit(start, end, f"{names} = {torch}.stack(({texts})).tolist()"), *imports)
    if _returned_at_once(source, reads, cast):
        texts = ", ".join(_text(source, facts, part, read, cast) for part, read in reads)
        start, end = source.start(reads[0][1].node), source.end(reads[-1][1].node)
        text = f"*{torch}.stack(({texts})).tolist()"
        line = source.text[source.line_start(reads[0][1].node.lineno) :].partition("\n")[0]
        if len(line) - (end - start) + len(text) <= width_of(source.text):
            return (TextEdit(start, end, text), *imports)
    groups: list[_Group] = []
    edits = [*imports]
    for part, read in reads:
        if not (same := [one for one in groups if equal(one.tensor, read.tensor)]):
            name = name_of(source, read.node, read.tensor, taken=[one.name for one in groups])
            text = _text(source, facts, part, read, cast)
            same = [_Group(name, read.tensor, text, _kind_read(facts, part, cast))]
            groups += same
        name = same[0].name
        edits.append(TextEdit.of(source, read.node, f"{read.cast}({name})" if read.cast else name))
    return (*edits, insert_before(source, reads[0][1].node, _lines(source, torch, groups)))


def _assigned_at_once(
    source: SourceFile, reads: Sequence[tuple[str, Read]], cast: str
) -> list[ast.Assign]:
    """Return the consecutive statements if each only assigns one read, to a name or an item, else none."""
    outer = [source.parents[read.node] for _, read in reads]
    every = [one for one in outer if isinstance(one, ast.Assign) and _target_of(one)]
    plain = not cast and not any(read.cast for _, read in reads)
    if not plain or len(every) < len(reads) or len(set(map(_target_of, every))) < len(every):
        return []
    block = source.block(every[0])
    at = block.index(every[0])
    between = source.text[source.start(every[0]) : source.end(every[-1])]
    return every if block[at : at + len(every)] == every and not any(comments(between)) else []


def _target_of(statement: ast.Assign) -> str:
    """Return the name that gets a value, or the item of a name by a constant, or `""`."""
    target = statement.targets[0]
    owner = target
    if isinstance(target, ast.Subscript) and isinstance(target.slice, ast.Constant):
        owner = target.value
    alone = len(statement.targets) == 1 and isinstance(owner, ast.Name)
    return ast.unparse(target) if alone else ""


def _returned_at_once(source: SourceFile, reads: Sequence[tuple[str, Read]], cast: str) -> bool:
    """Return True if the reads follow each other among other values that a function returns."""
    nodes = [read.node for _, read in reads]
    values = source.parents[nodes[0]]
    if not isinstance(values, ast.Tuple) or not isinstance(source.parents[values], ast.Return):
        return False
    plain = not cast and not any(read.cast for _, read in reads) and nodes[0] in values.elts
    at = values.elts.index(nodes[0]) if plain else 0
    between = source.text[source.start(nodes[0]) : source.end(nodes[-1])]
    together = values.elts[at : at + len(nodes)] == nodes and len(nodes) < len(values.elts)
    return plain and together and not any(comments(between))


class _Group(NamedTuple):
    """A tensor to read, the name and text of its value, and the conversion to the type that was read."""

    name: str
    tensor: ast.expr
    text: str
    kind: str


def _lines(source: SourceFile, torch: str, groups: Sequence[_Group]) -> str:
    """Return the combined read."""
    names = ", ".join(one.name for one in groups)
    if len(groups) == 1:
        return f"{names} = {atom(source, groups[0].tensor)}.item()"
    together = f"{names} = {torch}.stack(({', '.join(one.text for one in groups)})).tolist()"
    made = [f"{one.name} = {one.kind}({one.name})" for one in groups if one.kind]
    return "\n".join([together, *made])


def _text(source: SourceFile, facts: Facts, part: str, read: Read, cast: str) -> str:
    flat = facts.holds(shapeless := lambda v: not getattr(v, part).shape)
    flat = flat or (not facts.seen and facts.holds_statically(shapeless) is True)
    bare = source.segment(read.tensor)
    if flat and not cast:
        return bare if not isinstance(read.tensor, ast.Tuple | ast.Starred) else f"({bare})"
    return atom(source, read.tensor) + ("" if flat else ".reshape(())") + cast


def _kind_read(facts: Facts, part: str, cast: str) -> str:
    """Return the conversion of a value that was read as a float, with others, to its own type."""
    if not cast:
        return ""
    truth = facts.holds(lambda v: getattr(v, part).dtype == "bool")
    integral = facts.holds(lambda v: is_integral(getattr(v, part)))
    return "bool" if truth else "int" if integral else ""


COALESCED_READS: Fix = Fix(
    name="coalesced_reads",
    doc="""Adjacent reads, `a.item()` and `b.item()`, become one read of both.

    Each read is a host-device sync that copies one number. Stacked, they need one copy: `a_value, b_value =
    torch.stack((a, b)).tolist()`. They may be in one statement, as arguments, in a dictionary or an f-string,
    or in consecutive statements with no side effect in between. The numbers are the same, since a Python
    number holds each value exactly; floats are read together with counts in 64 bits.

    The values are assumed to be real numbers, as in the observed run. Refused if fewer than two are on one
    device with compatible types.
    """,
    codes=("TT101",),
    equivalence="BITWISE",
    find=_find_runs,
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
    cast = next((name for name in ("float", "int") if f"{name}(V)" in match.form), "")
    kinds = ("list", "tuple") if template is _LIST else ("dict",)
    if cast:
        template = (_CAST_LIST if template is _LIST else _CAST_DICT).replace("CAST", cast)
    facts.need(
        f"`{match.text('X')[:60]}` is a {kinds[0]} of tensors of zero dimensions",
        lambda v: (
            (not hasattr(v, "X") or v.X.kind in kinds)
            and (not hasattr(v, "V") or (is_tensor(v.V) and not v.V.shape))
        ),
    )
    kinds_read = {(v.V.dtype, v.V.device) for v in facts.executions if hasattr(v, "V")}
    if len(kinds_read) > 1:
        raise FixRefused("it reads several types or devices")
    if not kinds_read:
        facts.leave_open("they are tensors of zero dimensions")
    if cast == "float":
        facts.need("they contain floats", lambda v: not hasattr(v, "V") or is_floating(v.V))
    if cast == "int":
        facts.need(
            "they contain integers",
            lambda v: not hasattr(v, "V") or (is_integral(v.V) and v.V.dtype != "bool"),
        )
    return Writing(replace(match, template, {"X": "read"}))


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
