"""Writes a condition of `and`, `or`, `not` and chained comparisons as one tensor expression."""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

from torchtrim.records.probes import ObservedValue
from torchtrim.rewriter.fix import Match
from torchtrim.rewriter.replace import atom
from torchtrim.source.facts import Facts, FixRefused, Values, is_tensor
from torchtrim.source.names import assigned_to, stores
from torchtrim.source.nodes import find_all, function_of, negated
from torchtrim.source.operations import is_total
from torchtrim.source.source import SourceFile
from torchtrim.source.typed import typed

_COMPARED: dict[type[ast.cmpop], str] = {
    ast.Lt: "<",
    ast.LtE: "<=",
    ast.Gt: ">",
    ast.GtE: ">=",
    ast.Eq: "==",
    ast.NotEq: "!=",
}


class Operand(NamedTuple):
    """An operand of a condition. `sides`: its nodes in the source; a link of a chain has two."""

    node: ast.expr
    sides: tuple[ast.expr, ...]


def operands(condition: ast.expr) -> list[Operand]:
    """Return the operands of a condition in evaluation order; the condition itself if it has no operator."""
    if isinstance(condition, ast.BoolOp):
        return [operand for value in condition.values for operand in operands(value)]
    if inner := negated(condition):
        return operands(inner)
    return _links(condition) or [Operand(condition, (condition,))]


def _links(node: ast.expr) -> list[Operand]:
    """Return the comparisons that a chain such as `0 < x < 1` makes; empty for other code."""
    if not isinstance(node, ast.Compare) or len(node.ops) == 1:
        return []
    if not all(type(op) in _COMPARED for op in node.ops):
        return []
    pairs = zip(pairwise([node.left, *node.comparators]), node.ops, strict=True)
    return [Operand(ast.Compare(sides[0], [op], [sides[1]]), sides) for sides, op in pairs]


def operand_parts(condition: ast.expr) -> dict[str, ast.expr]:
    """Return the operands of a match's condition (its part `C`) as parts."""
    return {
        f"Q{number}{at}": side
        for number, operand in enumerate(operands(condition))
        for at, side in zip("AB", operand.sides, strict=False)
    }


def need_operands(match: Match, facts: Facts) -> None:
    """Require that each operand is a tensor, or compares one; without a run, the source has to show it."""
    for number, operand in enumerate(operands(match.parts["C"])):
        sides = [f"Q{number}{at}" for at in "AB"[: len(operand.sides)]]

        def has_tensor(values: Values, sides: Sequence[str] = sides) -> bool:
            return any(is_tensor(getattr(values, side)) for side in sides)

        facts.need(f"`{ast.unparse(operand.node)[:60]}` is a tensor", has_tensor, static=has_tensor)


def seen_operands(
    match: Match, values: Values, known: Mapping[str, ObservedValue]
) -> tuple[str, set[int]]:
    """Return the device of a condition's operands, and the indices of operands that are not booleans.

    Raises `FixRefused` if an operand was not a tensor of zero dimensions, or may have an effect.
    """
    every = operands(match.parts["C"])
    devices: set[str] = set()
    numeric = set()
    for number, operand in enumerate(every):
        text = ast.unparse(operand.node)
        seen: ObservedValue | None = None
        if len(operand.sides) == 1:
            seen = known.get(text) or getattr(values, f"Q{number}A", None)
        if seen is not None and not is_tensor(seen):
            raise FixRefused(_no_tensor(operand.node, alone=len(every) == 1))
        if not is_total(operand.node, match.source) or _may_be_plain(operand.node, match.source):
            raise FixRefused(
                f"`{text[:60]}` may have a side effect, or be a Python value in another run. "
                "Assign it to a name first"
            )
        result = seen or typed(operand.node, match.source, known)
        if result is None:
            raise FixRefused(f"no run has reached `{text[:60]}`, which may not be a tensor")
        if result.shape:
            raise FixRefused("its condition is not a tensor of zero dimensions")
        if result.dtype != "bool":
            numeric.add(number)
        if seen is not None:
            devices.add(seen.device)
    devices |= {tensor.device for tensor in known.values() if is_tensor(tensor)}
    if len(devices) != 1:
        raise FixRefused("some of its tensors are not on the device of its condition")
    return devices.pop(), numeric


def _may_be_plain(node: ast.expr, source: SourceFile) -> bool:
    """Return True for a name that `and`, `or` or `if` may have given a Python value."""
    if not isinstance(node, ast.Name):
        return False
    values = (assigned_to(source, one) for one in stores(source.function(node), node.id))
    return any(isinstance(one, ast.BoolOp | ast.IfExp | ast.Constant) for one in values)


def _no_tensor(condition: ast.expr, *, alone: bool) -> str:
    """Return why an operand that is a Python value is refused: it may have been read from a tensor."""
    for node in find_all(condition, ast.Call):
        if (read := _read_by(node)) is not None:
            return (
                f"its condition reads `{ast.unparse(node)[:60]}` on the host before the comparison. "
                f"Compare `{read[:60]}` itself, so that the device can choose"
            )
    if alone:
        return "its condition is not a tensor, so it needs no host-device sync"
    return (
        f"`{ast.unparse(condition)[:60]}` in its condition is a Python value. Test it in a "
        "separate `if`, "
        "around one for the rest"
    )


def _read_by(call: ast.Call) -> str | None:
    if function_of(call) in ("float", "int", "bool") and call.args:
        return ast.unparse(call.args[0])
    if isinstance(call.func, ast.Attribute) and call.func.attr in ("item", "tolist"):
        return ast.unparse(call.func.value)
    return None


def as_tensor(condition: ast.expr, source: SourceFile, numeric: Collection[int]) -> str:
    """Return the condition's text for tensor operands; `numeric` are the indices of non-booleans."""
    return _text(condition, source, numeric, iter(range(len(operands(condition)))))


def _text(
    node: ast.expr, source: SourceFile, numeric: Collection[int], numbers: Iterator[int]
) -> str:
    if isinstance(node, ast.BoolOp):
        sign = " & " if isinstance(node.op, ast.And) else " | "
        return sign.join(_within(one, source, numeric, numbers) for one in node.values)
    if inner := negated(node):
        return f"~{_within(inner, source, numeric, numbers)}"
    if links := [link for link in _links(node) if next(numbers) >= 0]:
        texts = []
        for link in links:
            assert isinstance(link.node, ast.Compare)
            left, right = (atom(source, side) for side in link.sides)
            texts.append(f"({left} {_COMPARED[type(link.node.ops[0])]} {right})")
        return " & ".join(texts)
    return f"{atom(source, node)} != 0" if next(numbers) in numeric else source.segment(node)


def _within(
    node: ast.expr, source: SourceFile, numeric: Collection[int], numbers: Iterator[int]
) -> str:
    text = _text(node, source, numeric, numbers)
    return text if text == source.segment(node) == atom(source, node) else f"({text})"
