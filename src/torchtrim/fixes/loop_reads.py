"""Reads in a loop of what the loop does not change: one read before, or in place of the loop's tensor."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from torchtrim.rewriter.fix import Edit, Fix, Match, Writing
from torchtrim.rewriter.guarded import names_tested, with_names
from torchtrim.rewriter.replace import atom, check_comments, fresh, insert_before
from torchtrim.source.facts import Facts, Refused, is_tensor, need_tensor
from torchtrim.source.names import is_private, literal_stores, only_reads, was_fresh
from torchtrim.source.purity import is_pure
from torchtrim.source.reads import bare, is_whole, read_of, reads_in
from torchtrim.source.source import Loop, Source, within
from torchtrim.source.uses import binds, loads, names_in, stores

_HARMLESS_METHODS_NAMES = """
    append extend insert items keys values get join format split strip startswith endswith lower
    upper replace count index
"""
_HARMLESS_METHODS = frozenset(_HARMLESS_METHODS_NAMES.split())
_HARMLESS = frozenset(["print", "sorted", "repr", "id", "type", "slice", "iter"])
_EAGER = frozenset(["sum", "list", "tuple", "max", "min", "any", "all", "sorted", "set"])
_COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.GeneratorExp)


def _iterations(source: Source) -> Iterator[Match]:
    """Loops and comprehensions over something, whose elements are only read."""
    for node in source.nodes:
        if isinstance(node, _COMPREHENSIONS) and len(node.generators) == 1:
            (generator,) = node.generators
            yield from _match(source, node, generator.target, generator.iter)
        elif isinstance(node, ast.For):
            yield from _match(source, node, node.target, node.iter)


def _match(source: Source, node: ast.AST, target: ast.expr, iterated: ast.expr) -> Iterator[Match]:
    found = _element(target, iterated)
    if found is None:
        return
    name, tensor = found
    uses = loads(node, name)
    reads = [source.parents[_top(source, use)] for use in uses]
    if not uses or not all(_reads(source, use) for use in uses):
        return
    first = min(reads, key=lambda one: one.lineno)  # type: ignore[attr-defined]
    last = max(reads, key=lambda one: one.lineno)  # type: ignore[attr-defined]
    yield Match(fix=ITERATED_READ, source=source, node=last, begin=first, parts={"X": tensor})


def _element(target: ast.expr, iterated: ast.expr) -> tuple[str, ast.expr] | None:
    """The name of an element and what it is of, in `enumerate` too."""
    if isinstance(target, ast.Name):
        known = isinstance(iterated, ast.Name | ast.Attribute | ast.Subscript | ast.Call)
        return (target.id, iterated) if known and not _is_builtin(iterated) else None
    if not isinstance(target, ast.Tuple) or len(target.elts) != 2 or not _is_builtin(iterated):
        return None
    assert isinstance(iterated, ast.Call)
    assert isinstance(iterated.func, ast.Name)
    (_, second) = target.elts
    plain = iterated.func.id == "enumerate" and len(iterated.args) >= 1
    return (second.id, iterated.args[0]) if plain and isinstance(second, ast.Name) else None


def _is_builtin(node: ast.expr) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name)


def _top(source: Source, use: ast.Name) -> ast.AST:
    outer = source.parents[use]
    return outer if isinstance(outer, ast.Attribute) else use


def _reads(source: Source, use: ast.Name) -> bool:
    call = source.parents[_top(source, use)]
    read = read_of(call, source)
    return read is not None and read.tensor is use and is_whole(source, call)


def _listed(match: Match, facts: Facts) -> Writing:
    """The numbers of the tensor, in its place."""
    source, tensor = match.source, match.parts["X"]
    facts.need(
        f"`{match.text('X')[:60]}` is a tensor of one dimension",
        lambda v: is_tensor(v.X) and len(v.X.shape) == 1,
        told=lambda v: is_tensor(v.X),
    )
    around = source.parents[tensor]
    if isinstance(around, ast.Call):
        around = source.parents[around]
    around = source.parents[around] if isinstance(around, ast.comprehension) else around
    risk = _risk(match, around)
    target = around.target if isinstance(around, ast.For) else around.generators[0].target  # type: ignore[attr-defined]
    name = target.id if isinstance(target, ast.Name) else target.elts[1].id  # type: ignore[union-attr]
    if isinstance(around, ast.For):
        _check_name(source, around, name)
    edits = [
        Edit(source.start(tensor), source.end(tensor), f"{atom(source, tensor)}.flatten().tolist()")
    ]
    for use in loads(around, name):
        call = source.parents[_top(source, use)]
        read = read_of(call, source)
        assert read is not None
        text = f"{read.cast}({name})" if read.cast else name
        edits.append(Edit(source.start(call), source.end(call), text))
    check_comments(source, edits)
    return Writing(tuple(edits), risk)


def _risk(match: Match, around: ast.AST) -> str:
    source, tensor = match.source, match.parts["X"]
    if isinstance(around, ast.GeneratorExp):
        outer = source.parents[around]
        named = isinstance(outer, ast.Call) and isinstance(outer.func, ast.Name)
        if not named or outer.func.id not in _EAGER:  # type: ignore[attr-defined]
            raise Refused("it is read when somebody asks for it, which may be later. Use a list")
    held = _changes_nothing(source, around)
    if not held and isinstance(around, ast.For):
        held = _keeps(source, around, tensor)
    if held:
        return ""
    return f"something that is called meanwhile might write to `{match.text('X')[:60]}`"


def _check_name(source: Source, loop: ast.For, name: str) -> None:
    """After the loop the name is a number, so nobody may look at it."""
    function = source.function(loop)
    alone = len(loads(function, name)) == len(loads(loop, name))
    if not alone or not is_private(source, function, name):
        raise Refused(f"`{name}` is used after the loop, as a tensor")
    if len(stores(loop, name)) > 1:
        raise Refused(f"`{name}` is given another value in the loop")


ITERATED_READ: Fix = Fix(
    name="iterated_read",
    doc="""`[int(v) for v in x]` and `for v in x: ... v.item()` go over `x.flatten().tolist()`: one read.

    Iterating a tensor gives views of its elements, and each of them is read on its own. Where an element is
    used for nothing but its number, the numbers are read in one copy. Rows of one element count as elements.

    Holds for tensors of one dimension. Suggested, not applied, where something that is called meanwhile
    might write to the tensor, whose later elements would be read before it.

    Values that are read count as real numbers, as in the run that was watched.
    """,
    codes=("TT101",),
    equivalence="BITWISE",
    find=_iterations,
    write=_listed,
)


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
            yield Match(fix=INVARIANT_READ, source=source, node=node, parts=parts)


def _invariant(source: Source) -> Iterator[Match]:
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
    if loop is None or (isinstance(loop, ast.For) and within(node, loop.iter)):
        return None
    if not binds(loop, tensor):
        return {"X": tensor}
    if isinstance(tensor, ast.Subscript) and not binds(loop, tensor.value):
        found = tensor.slice.elts if isinstance(tensor.slice, ast.Tuple) else [tensor.slice]
        if not any(isinstance(one, ast.Slice | ast.Starred) for one in found):
            return {"X": tensor.value, **{f"I{n}": one for n, one in enumerate(found)}}
    return None


def _is_guarded(source: Source, node: ast.AST) -> bool:
    """Whether it is already read only where it has not been."""
    assign, outer = source.statement(node), source.parents[source.statement(node)]
    return (
        isinstance(assign, ast.Assign)
        and isinstance(outer, ast.If)
        and ast.unparse(outer.test) == f"{ast.unparse(assign.targets[0])} is None"
    )


def _read_once(match: Match, facts: Facts) -> Writing:
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
    for loop in _loops_around(source, match.node):
        if binds(loop, tensor) or not _keeps(source, loop, tensor):
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


INVARIANT_READ: Fix = Fix(
    name="invariant_read",
    doc="""`mask.sum(1).tolist()` and `sizes[i].tolist()` in a loop are read once, before they are first
    needed.

    A read in a loop waits each time round. Where its tensor stays the same throughout the loop, one read is
    enough; where it is a row of one, the whole is read once and the row is taken on the host. It is read
    when it is first needed, so a loop that runs zero times reads nothing, as before. Lists are given out as
    copies, since what gets one may change it.

    Holds where nothing in the loop can write to the tensor: it has one name, through which it is only read,
    or the loop calls nothing but known functions. Otherwise it is suggested: a function that is called
    might.

    Values that are read count as real numbers, as in the run that was watched.
    """,
    codes=("TT101",),
    equivalence="BITWISE",
    find=_invariant,
    write=_read_once,
)


def _loops_around(source: Source, node: ast.AST) -> Iterator[Loop]:
    """The loops of the same function around a node, innermost first."""
    at = source.loop(node)
    while at is not None:
        yield at
        at = source.loop(at)


def _changes_nothing(source: Source, inside: ast.AST) -> bool:
    """Whether no tensor is written to there, as far as its form tells: known functions, no assignment in
    place."""
    return all(_harmless(source, node) for node in ast.walk(inside))


def _keeps(source: Source, loop: Loop, expression: ast.expr) -> bool:
    """Whether an expression's names mean the same tensors, with the same content, throughout the loop."""
    if binds(loop, expression):
        return False
    if _changes_nothing(source, loop):
        return True
    if any(
        isinstance(node, ast.Attribute) and _is_data(source, node) for node in ast.walk(expression)
    ):
        return False
    own = names_in(expression) - set(source.imported)
    return all(
        was_fresh(source, name, loop) and all(only_reads(source, use) for use in loads(loop, name))
        for name in own
    )


def _is_data(source: Source, node: ast.Attribute) -> bool:
    outer = source.parents[node]
    return not (isinstance(outer, ast.Call) and outer.func is node) and source.dotted(node) is None


def _harmless(source: Source, node: ast.AST) -> bool:
    if isinstance(node, ast.Call):
        words = {word.arg for word in node.keywords}
        called = ast.Call(node.func, [], [])
        return (is_pure(called, source) and not words & {"out", "inplace"}) or _is_harmless_call(
            node
        )
    if isinstance(node, ast.Attribute | ast.Subscript):
        return isinstance(node.ctx, ast.Load)
    if isinstance(node, ast.AugAssign):
        name = node.target.id if isinstance(node.target, ast.Name) else ""
        return bool(name and literal_stores(source, source.function(node), name))
    return not isinstance(node, ast.Await | ast.Yield | ast.YieldFrom | ast.With | ast.AsyncFor)


def _is_harmless_call(call: ast.Call) -> bool:
    if any(word.arg in ("out", "inplace", None) for word in call.keywords):
        return False
    if isinstance(call.func, ast.Attribute):
        return call.func.attr in _HARMLESS_METHODS
    return isinstance(call.func, ast.Name) and call.func.id in _HARMLESS


FIXES = (INVARIANT_READ, ITERATED_READ)
