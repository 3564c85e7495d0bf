"""`[int(v) for v in x]` and `for v in x: ... v.item()` go over `x.flatten().tolist()`: one read.

Iterating a tensor gives views of its elements, and each of them is read on its own. Where an element is
used for nothing but its number, the numbers are read in one copy. Rows of one element count as elements.

Holds for tensors of one dimension. Suggested, not applied, where something that is called meanwhile might
write to the tensor, whose later elements would be read before it.

Values that are read count as real numbers, as in the run that was watched.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

from torchtrim.rewriter.fix import Edit, Fix, Match, Writing
from torchtrim.rewriter.replace import atom, check_comments
from torchtrim.source.facts import Facts, Refused, is_tensor
from torchtrim.source.loops import changes_nothing, keeps
from torchtrim.source.names import is_private
from torchtrim.source.reads import is_whole, read_of
from torchtrim.source.source import Source

_EAGER = frozenset(["sum", "list", "tuple", "max", "min", "any", "all", "sorted", "set"])
_COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.GeneratorExp)


def find(source: Source) -> Iterator[Match]:
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
    uses = [
        one
        for one in ast.walk(node)
        if isinstance(one, ast.Name) and one.id == name and isinstance(one.ctx, ast.Load)
    ]
    reads = [source.parents[_top(source, use)] for use in uses]
    if not uses or not all(_reads(source, use) for use in uses):
        return
    first = min(reads, key=lambda one: one.lineno)  # type: ignore[attr-defined]
    last = max(reads, key=lambda one: one.lineno)  # type: ignore[attr-defined]
    yield Match(fix=FIX, source=source, node=last, begin=first, parts={"X": tensor})


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


def write(match: Match, facts: Facts) -> Writing:
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
    for use in ast.walk(around):
        if isinstance(use, ast.Name) and use.id == name and isinstance(use.ctx, ast.Load):
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
    held = changes_nothing(source, around)
    if not held and isinstance(around, ast.For):
        held = keeps(source, around, tensor)
    if held:
        return ""
    return f"something that is called meanwhile might write to `{match.text('X')[:60]}`"


def _check_name(source: Source, loop: ast.For, name: str) -> None:
    """After the loop the name is a number, so nobody may look at it."""
    function = source.function(loop)
    own = {id(one) for one in ast.walk(loop)}
    others = [
        one
        for one in ast.walk(function)
        if isinstance(one, ast.Name) and one.id == name and id(one) not in own
    ]
    if any(isinstance(one.ctx, ast.Load) for one in others) or not is_private(
        source, function, name
    ):
        raise Refused(f"`{name}` is used after the loop, as a tensor")
    stores = [
        one
        for one in ast.walk(loop)
        if isinstance(one, ast.Name) and one.id == name and not isinstance(one.ctx, ast.Load)
    ]
    if len(stores) > 1:
        raise Refused(f"`{name}` is given another value in the loop")


FIX = Fix(codes=("TT101",), equivalence="BITWISE", find=find, write=write)
