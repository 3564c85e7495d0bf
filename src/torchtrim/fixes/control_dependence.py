"""A condition that decides what the host does next cannot be left to the device: refused, with a way out.

`if torch.isnan(loss): raise`, `while not done.all():`, `for i in range(n.item()):` and branches that call
something need the value now. What can be done depends on what hangs on it: look less often, keep a flag
on the device and read it once, ask the host first what it knows, or let the device check.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

from torchtrim.fixes.conditional_fill import fills
from torchtrim.rewriter.fix import Fix, Match, Writing
from torchtrim.source.branches import branches
from torchtrim.source.facts import Facts, Refused
from torchtrim.source.source import Source
from torchtrim.source.total import is_total

_ASKING_NAMES = """
    any all item isnan isinf isfinite equal allclose is_nonzero max min sum norm tolist count_nonzero
    eq ne lt le gt ge
"""
_ASKING = frozenset(_ASKING_NAMES.split())
_RAISES = (
    "it raises, so the host must know at once. Check every N steps, or let the device check with "
    "`torch._assert_async(condition)`, which fails later"
)
_LEAVES = (
    "it decides whether the loop goes on. Check every N steps, or keep the flag on the device, mask what is "
    "done, and read it once after the loop"
)
_REPEATS = (
    "how often the loop runs depends on the device. Run it for a number of times that the host knows, mask "
    "what is done, and check every N times"
)
_COUNTED = (
    "the host counts to a number of the device. Count to one that the host knows, such as a size or a count "
    "that was kept when the data was made; where a chunk may be empty, `max(1, ...)` of that"
)
_CALLS = (
    "what hangs on it has an effect, so the host must know. Ask first what the host knows (`a and b` stops "
    "at `a`), compute the flag once outside and pass it in, or add flags up on the device and read them "
    "once a step"
)


def find(source: Source) -> Iterator[Match]:
    """Conditions and ranges that may depend on the device, and that nothing else is for."""
    values = {
        branch.test
        for branch in branches(source)
        if all(is_total(one, source) for one in branch.expressions)
    }
    for node in source.at({(ast.If, ""), (ast.While, ""), (ast.IfExp, "")}):
        assert isinstance(node, ast.If | ast.While | ast.IfExp)
        filled = isinstance(node, ast.If) and fills(source, node)
        if node.test not in values and not filled and _asks(node.test):
            yield Match(fix=FIX, source=source, node=node.test, parts={"C": node.test})
    for node in source.at({(ast.For, "")}):
        assert isinstance(node, ast.For)
        if _is_range(node.iter):
            yield Match(fix=FIX, source=source, node=node.iter, parts={"C": node.iter})


def _asks(node: ast.AST) -> bool:
    return any(
        isinstance(one, ast.Call)
        and (
            (isinstance(one.func, ast.Attribute) and one.func.attr in _ASKING)
            or (isinstance(one.func, ast.Name) and one.func.id in ("bool", "float", "int"))
        )
        for one in ast.walk(node)
    ) or isinstance(node, ast.Name | ast.Compare | ast.UnaryOp)


def _is_range(node: ast.expr) -> bool:
    named = isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
    return named and node.func.id == "range"  # type: ignore[attr-defined]


def write(match: Match, facts: Facts) -> Writing:
    """Raises `Refused`, always."""
    outer = match.source.parents[match.node]
    raise Refused(_reason(outer))


def _reason(outer: ast.AST) -> str:
    if isinstance(outer, ast.While):
        return _REPEATS
    if isinstance(outer, ast.For):
        return _COUNTED
    body = [*outer.body, *outer.orelse] if isinstance(outer, ast.If) else []
    inside = [one for statement in body for one in ast.walk(statement)]
    if any(isinstance(one, ast.Raise) for one in inside):
        return _RAISES
    if any(isinstance(one, ast.Break | ast.Continue) for one in inside):
        return _LEAVES
    return _CALLS


FIX = Fix(codes=("TT101",), equivalence="BITWISE", find=find, write=write)
