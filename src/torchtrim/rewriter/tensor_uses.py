"""Where a value goes: whether a tensor of no dimensions may take a Python number's place."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from dataclasses import replace as changed

from torchtrim.rewriter.fix import Match
from torchtrim.source.facts import Facts, Refused, is_floating
from torchtrim.source.source import Function, Source
from torchtrim.source.uses import loads, stores

_ARITHMETIC = (ast.Add, ast.Sub, ast.Mult, ast.Div)
_READS = ("float", "int", "bool")
_WITH = "WITH"
Find = Callable[[Source], Iterator[Match]]


def with_companions(find: Find, *, bounded: bool = False) -> Find:
    """The same places, with what each value is computed with as parts `WITH0`, `WITH1`, ...

    `bounded`: a use in `max(value, 1)` goes on to what that is computed with; see `bounds_of`.
    """

    def companions(source: Source) -> Iterator[Match]:
        for match in find(source):
            found = _uses(source, match.node, 0, [] if bounded else None)
            others = [use for use in found if isinstance(use, ast.expr)]
            parts = {**match.parts, **{f"{_WITH}{n}": one for n, one in enumerate(others)}}
            yield changed(match, parts=parts)

    return companions


def bounds_of(match: Match) -> list[ast.Call]:
    """The calls `max(value, 1)` through which the value of the match, under a name, is used."""
    bounds: list[ast.Call] = []
    list(_uses(match.source, match.node, 0, bounds))
    return bounds


def need_tensor_uses(match: Match, facts: Facts, part: str, *, bounded: bool = False) -> None:
    """What must hold where the value of the match becomes a tensor on the device of a part.

    Each use is arithmetic with a floating tensor there, whose result is one as before, or a read that
    takes a tensor too. Raises `Refused` with the first use that is neither.
    """
    for use in _uses(match.source, match.node, 0, [] if bounded else None):
        if isinstance(use, str):
            raise Refused(
                f"its value is needed as a number of Python's: {use}. Keep the read, and make it late or "
                "together with others"
            )
    for name in match.parts:
        if name.startswith(_WITH):
            facts.need(
                f"`{match.text(name)[:60]}` is a floating tensor on the same device",
                lambda v, name=name: (
                    is_floating(getattr(v, name))  # type: ignore[misc]
                    and getattr(v, name).device == getattr(v, part).device
                ),
            )


def need_wide_uses(match: Match, facts: Facts) -> None:
    """What must hold besides for a whole number: a 16-bit float next to it would round it, or overflow."""
    for name in match.parts:
        if name.startswith(_WITH):
            facts.need(
                f"`{match.text(name)[:60]}` is of float32 or float64",
                lambda v, name=name: getattr(v, name).dtype in ("float32", "float64"),  # type: ignore[misc]
            )


def _uses(
    source: Source, node: ast.AST, depth: int, bounds: list[ast.Call] | None
) -> Iterator[ast.expr | str]:
    """What a value is computed with, and, as text, each use that needs a number.

    `bounds` collects the calls of `max` that are passed through; None where none may be.
    """
    outer = source.parents[node]
    where = f"line {node.lineno}"  # type: ignore[attr-defined]
    if depth > 8:
        yield f"{where}, and it goes on from there"
    elif isinstance(outer, ast.BinOp) and isinstance(outer.op, _ARITHMETIC):
        yield outer.left if outer.right is node else outer.right
    elif isinstance(outer, ast.AugAssign) and isinstance(outer.op, _ARITHMETIC):
        yield outer.target
    elif isinstance(outer, ast.UnaryOp) and not isinstance(outer.op, ast.Not):
        yield from _uses(source, outer, depth + 1, bounds)
    elif isinstance(outer, ast.Call) and node in outer.args and _reads(outer):
        return
    elif bounds is not None and isinstance(outer, ast.Call) and _is_bound(source, outer, node):
        bounds.append(outer)
        yield from _uses(source, outer, depth + 1, bounds)
    elif isinstance(outer, ast.Assign) and len(outer.targets) == 1:
        yield from _uses_of_name(source, outer, depth, bounds)
    else:
        yield f"{where}, `{source.segment(outer)[:60]}`" if isinstance(outer, ast.expr) else where


def _is_bound(source: Source, call: ast.Call, node: ast.AST) -> bool:
    """Whether it is `max(name, 1)` or `max(1, name)`, of Python's own `max`."""
    if not isinstance(call.func, ast.Name) or call.func.id != "max" or call.keywords:
        return False
    if any(name == "max" for name in source.imported) or list(stores(source.tree, "max")):
        return False
    others = [one for one in call.args if one is not node]
    return (
        isinstance(node, ast.Name)
        and len(call.args) == 2
        and len(others) == 1
        and isinstance(others[0], ast.Constant)
        and type(others[0].value) is int
    )


def _reads(call: ast.Call) -> bool:
    return isinstance(call.func, ast.Name) and call.func.id in _READS


def _uses_of_name(
    source: Source, assigned: ast.Assign, depth: int, bounds: list[ast.Call] | None
) -> Iterator[ast.expr | str]:
    target = assigned.targets[0]
    function = source.function(assigned)
    if not isinstance(target, ast.Name) or not isinstance(function, Function):
        yield f"line {assigned.lineno}, where it leaves the function"
        return
    if len(list(stores(function, target.id))) > 1:
        yield f"line {assigned.lineno}, where a name that has other values too is given it"
        return
    for use in loads(function, target.id):
        if source.function(use) is not function:
            yield f"line {use.lineno}, in a function within"
        else:
            yield from _uses(source, use, depth + 1, bounds)
