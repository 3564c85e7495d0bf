"""Reads in a loop that the loop does not change: one read before it, or in place of the tensor it
iterates over.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from torchtrim.rewriter.fix import Fix, Match, TextEdit, Writing
from torchtrim.rewriter.guarded import names_tested, with_names
from torchtrim.rewriter.replace import atom, check_comments, fresh, insert_before, need_indentation
from torchtrim.source.facts import Facts, FixRefused, is_tensor, need_tensor, of_part
from torchtrim.source.names import (
    binds,
    is_fresh_name,
    is_private,
    literal_stores,
    loads,
    names_in,
    only_reads,
    stores,
)
from torchtrim.source.operations import is_pure
from torchtrim.source.source import Loop, SourceFile, within
from torchtrim.source.transfers import has_own_text, read_of, reads_in, without_detach

_HARMLESS_METHODS_NAMES = """
    append extend insert items keys values get join format split strip startswith endswith lower
    upper replace count index
"""
_HARMLESS_METHODS = frozenset(_HARMLESS_METHODS_NAMES.split())
_HARMLESS = frozenset(["print", "sorted", "repr", "id", "type", "slice", "iter"])
_EAGER = frozenset(["sum", "list", "tuple", "max", "min", "any", "all", "sorted", "set"])
_COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.GeneratorExp)


def _iterations(source: SourceFile) -> Iterator[Match]:
    """Yield loops and comprehensions over a tensor whose elements are only read."""
    for node in source.nodes:
        if isinstance(node, _COMPREHENSIONS) and len(node.generators) == 1:
            (generator,) = node.generators
            yield from _match(source, node, generator.target, generator.iter)
        elif isinstance(node, ast.For):
            yield from _match(source, node, node.target, node.iter)


def _match(
    source: SourceFile, node: ast.AST, target: ast.expr, iterated: ast.expr
) -> Iterator[Match]:
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
    """Return the name of an element and the iterated expression, in `enumerate` too."""
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


def _top(source: SourceFile, use: ast.Name) -> ast.AST:
    outer = source.parents[use]
    return outer if isinstance(outer, ast.Attribute) else use


def _reads(source: SourceFile, use: ast.Name) -> bool:
    call = source.parents[_top(source, use)]
    read = read_of(call, source)
    return read is not None and read.tensor is use and has_own_text(source, call)


def _listed(match: Match, facts: Facts) -> Writing:
    source, tensor = match.source, match.parts["X"]
    facts.need(
        f"`{match.text('X')[:60]}` is a tensor of one dimension",
        lambda v: is_tensor(v.X) and len(v.X.shape) == 1,
        static=lambda v: is_tensor(v.X),
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
        TextEdit(
            source.start(tensor), source.end(tensor), f"{atom(source, tensor)}.flatten().tolist()"
        )
    ]
    for use in loads(around, name):
        call = source.parents[_top(source, use)]
        read = read_of(call, source)
        assert read is not None
        text = f"{read.cast}({name})" if read.cast else name
        edits.append(TextEdit(source.start(call), source.end(call), text))
    check_comments(source, edits)
    return Writing(tuple(edits), risk)


def _risk(match: Match, around: ast.AST) -> str:
    source, tensor = match.source, match.parts["X"]
    if isinstance(around, ast.GeneratorExp):
        outer = source.parents[around]
        named = isinstance(outer, ast.Call) and isinstance(outer.func, ast.Name)
        if not named or outer.func.id not in _EAGER:  # type: ignore[attr-defined]
            raise FixRefused("a generator is read on demand, maybe later. Use a list")
    held = _changes_nothing(source, around)
    if not held and isinstance(around, ast.For):
        held = _keeps(source, around, tensor)
    if held:
        return ""
    return f"a function called in the meantime might write to `{match.text('X')[:60]}`"


def _check_name(source: SourceFile, loop: ast.For, name: str) -> None:
    """Raise `FixRefused` if the element's name, which becomes a number, is used after the loop."""
    function = source.function(loop)
    alone = len(loads(function, name)) == len(loads(loop, name))
    if not alone or not is_private(source, function, name):
        raise FixRefused(f"`{name}` is used as a tensor after the loop")
    if len(stores(loop, name)) > 1:
        raise FixRefused(f"`{name}` gets another value in the loop")


ITERATED_READ: Fix = Fix(
    name="iterated_read",
    doc="""`[int(v) for v in x]` and `for v in x: ... v.item()` iterate over `x.flatten().tolist()`: one read.

    Iterating over a tensor gives views of its elements, and each is read separately. If an element is used
    only for its number, one copy reads all the numbers. Rows of one element count as elements.

    Applies to tensors of one dimension. Suggested, not applied, if a function called in the meantime might
    write to the tensor, since later elements are now read before that.

    The values that are read are assumed to be real numbers, as in the observed run.
    """,
    codes=("TT101",),
    equivalence="BITWISE",
    find=_iterations,
    write=_listed,
)


def _find(source: SourceFile) -> Iterator[Match]:
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


def _invariant(source: SourceFile) -> Iterator[Match]:
    """Yield reads in a loop of names that the loop does not bind."""
    return with_names(_find)(source)


def _tensor(source: SourceFile, node: ast.Call) -> ast.expr | None:
    if any(
        True for one in node.args for _ in reads_in(one, source) if read_of(node, source) is None
    ):
        return None
    if isinstance(node.func, ast.Attribute) and node.func.attr == "tolist" and not node.args:
        return without_detach(node.func.value)
    read = read_of(node, source)
    inner = read is not None and read_of(source.parents[node], source) is not None
    return read.tensor if read is not None and not inner else None


def _parts(source: SourceFile, node: ast.Call, tensor: ast.expr) -> dict[str, ast.expr] | None:
    """Return the tensor, or the whole and the indices of a row of it."""
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


def _is_guarded(source: SourceFile, node: ast.AST) -> bool:
    """Return True if a test already limits the read to the first time."""
    assign, outer = source.statement(node), source.parents[source.statement(node)]
    return (
        isinstance(assign, ast.Assign)
        and isinstance(outer, ast.If)
        and ast.unparse(outer.test) == f"{ast.unparse(assign.targets[0])} is None"
    )


def _read_once(match: Match, facts: Facts) -> Writing:
    node = match.node
    assert isinstance(node, ast.Call)
    indices = [name for name in match.parts if name.startswith("I")]
    need_tensor(facts, "X", match.text("X"))
    for part in indices:
        facts.need(
            f"`{match.text(part)[:60]}` is a Python integer",
            of_part(part, lambda seen: seen.kind == "int"),
        )
    rank = facts.only("the number of dimensions", lambda v: len(v.X.shape), len(indices) or 1)
    left = rank - len(indices)
    listed = isinstance(node.func, ast.Attribute) and node.func.attr == "tolist"
    if left < 0 or left > (1 if listed else 0):
        raise FixRefused(
            "it reads a list of lists, or a tensor of one element and several dimensions"
        )
    loop, risk = _widest(match)
    test, imports, _ = names_tested(match, facts, ["X"]) if listed else ("", (), [])
    copied = listed and left == 1
    edits = _edits(match, loop, indices, copied=copied, test=test, scalar=not listed)
    return Writing((*imports, *edits), risk)


def _widest(match: Match) -> tuple[Loop, str]:
    """Return the outermost loop that leaves the tensor unchanged; else the innermost, and what may
    change it.
    """
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
    return inner, f"a function called in the loop might write to `{match.text('X')[:60]}`"


def _edits(
    match: Match, loop: Loop, indices: list[str], *, copied: bool, test: str, scalar: bool
) -> tuple[TextEdit, ...]:
    """Return the edits for the read and its value.

    `copied`: the value is a list. `test`: if it fails, the tensor is read as before. `scalar`: a number is
    read, whatever dimensions of size one there are.
    """
    source, node, tensor = match.source, match.node, match.parts["X"]
    assert isinstance(node, ast.Call)
    if not has_own_text(source, node):
        raise FixRefused("it is inside an f-string. Assign it to a name before")
    blanks = need_indentation(source, loop)
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
        TextEdit(start, start, f"{blanks}{name} = None{source.newline}"),
        insert_before(source, node, once),
        TextEdit(source.start(node), source.end(node), value),
    )
    check_comments(source, edits)
    return edits


def _joined(text: str) -> str:
    return " ".join(part.strip() for part in text.splitlines())


def _is_unpacked(source: SourceFile, node: ast.AST) -> bool:
    outer = source.parents[node]
    return isinstance(outer, ast.Assign) and all(
        isinstance(target, ast.Tuple | ast.List) for target in outer.targets
    )


INVARIANT_READ: Fix = Fix(
    name="invariant_read",
    doc="""`mask.sum(1).tolist()` and `sizes[i].tolist()` in a loop are read once, before they are first
    needed.

    A read in a loop waits in each iteration. If its tensor stays the same throughout the loop, one read is
    enough; if the read is of a row of such a tensor, the whole tensor is read once and the row taken on the
    host. The read happens when it is first needed, so a loop without iterations reads nothing, as before.
    Lists are copied, since the code that gets one may change it.

    Applies if nothing in the loop can write to the tensor: it has a single alias that is read-only, or the
    loop calls only known functions. Otherwise it is suggested, since a function that is called might write to
    it.

    The values that are read are assumed to be real numbers, as in the observed run.
    """,
    codes=("TT101",),
    equivalence="BITWISE",
    find=_invariant,
    write=_read_once,
)


def _loops_around(source: SourceFile, node: ast.AST) -> Iterator[Loop]:
    """Yield the loops of the same function around a node, innermost first."""
    at = source.loop(node)
    while at is not None:
        yield at
        at = source.loop(at)


def _changes_nothing(source: SourceFile, inside: ast.AST) -> bool:
    """Return True if the code writes to no tensor, judged by its form: known functions, no in-place
    assignment.
    """
    return all(_harmless(source, node) for node in ast.walk(inside))


def _keeps(source: SourceFile, loop: Loop, expression: ast.expr) -> bool:
    """Return True if an expression's names refer to the same, unchanged tensors throughout the loop."""
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
        is_fresh_name(source, name, loop)
        and all(only_reads(source, use) for use in loads(loop, name))
        for name in own
    )


def _is_data(source: SourceFile, node: ast.Attribute) -> bool:
    outer = source.parents[node]
    return not (isinstance(outer, ast.Call) and outer.func is node) and source.dotted(node) is None


def _harmless(source: SourceFile, node: ast.AST) -> bool:
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
