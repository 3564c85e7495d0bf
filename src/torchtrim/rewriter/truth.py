"""Writes a condition of `and`, `or`, `not` and chained comparisons as one tensor expression."""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import partial
from typing import NamedTuple, cast

from torchtrim.records.probes import ObservedValue
from torchtrim.rewriter.fix import Match
from torchtrim.rewriter.replace import atom
from torchtrim.source.branches import is_guard
from torchtrim.source.facts import Facts, FixRefused, Values, is_tensor
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


def operands(condition: ast.expr) -> tuple[Operand, ...]:
    """Return the operands of a condition in evaluation order; the condition itself if it has no operator."""
    return tuple(_operands(condition))


def _operands(node: ast.expr) -> Iterator[Operand]:
    if isinstance(node, ast.BoolOp):
        for one in node.values:
            yield from _operands(one)
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        yield from _operands(node.operand)
    elif _is_chain(node):
        yield from _links(node)
    else:
        yield Operand(node, (node,))


def _is_chain(node: ast.expr) -> bool:
    ops = node.ops if isinstance(node, ast.Compare) else []
    return len(ops) > 1 and all(type(op) in _COMPARED for op in ops)


def _links(node: ast.expr) -> Iterator[Operand]:
    assert isinstance(node, ast.Compare)
    sides = [node.left, *node.comparators]
    for left, op, right in zip(sides, node.ops, sides[1:], strict=False):
        yield Operand(ast.Compare(left, [op], [right]), (left, right))


def operand_parts(condition: ast.expr) -> dict[str, ast.expr]:
    """Return the operands of a match's condition (its part `C`) as parts."""
    found = enumerate(operands(condition))
    return {
        f"Q{n}{at}": side for n, one in found for at, side in zip("AB", one.sides, strict=False)
    }


def need_operands(match: Match, facts: Facts) -> None:
    """Require that each operand is a tensor, or compares one; without a run, the source has to say so."""
    for number, operand in enumerate(operands(match.parts["C"])):
        has_tensor = partial(_has_tensor, parts=_sides(number, operand))
        facts.need(f"`{ast.unparse(operand.node)[:60]}` is a tensor", has_tensor, static=has_tensor)


def _sides(number: int, operand: Operand) -> list[str]:
    return [f"Q{number}{at}" for at, _ in zip("AB", operand.sides, strict=False)]


def _has_tensor(values: Values, parts: Sequence[str]) -> bool:
    return any(is_tensor(cast(ObservedValue, getattr(values, part))) for part in parts)


def seen_operands(
    match: Match, values: Values, known: Mapping[str, ObservedValue]
) -> tuple[str, set[int]]:
    """Return the device of a condition's operands, and the indices of operands that are not booleans.

    Raises `FixRefused` if an operand was not a tensor of zero dimensions, or may have an effect.
    """
    found = operands(match.parts["C"])
    devices: set[str] = set()
    numeric = set()
    for number, operand in enumerate(found):
        seen = _seen(operand, number, values, known)
        if seen is not None and not is_tensor(seen):
            raise FixRefused(_no_tensor(operand.node, alone=len(found) == 1))
        _check_total(operand, match.source)
        made = seen or typed(operand.node, match.source, known)
        if made is None:
            raise FixRefused(
                f"no run has reached `{ast.unparse(operand.node)[:60]}`, which may not be a tensor"
            )
        if made.shape:
            raise FixRefused("its condition is not a tensor of zero dimensions")
        numeric |= {number} if made.dtype != "bool" else set()
        devices |= {seen.device} if seen is not None else set()
    devices |= {one.device for one in known.values() if is_tensor(one)}
    if len(devices) != 1:
        raise FixRefused("some of its tensors are not on the device of its condition")
    return devices.pop(), numeric


def _seen(
    operand: Operand, number: int, values: Values, known: Mapping[str, ObservedValue]
) -> ObservedValue | None:
    if len(operand.sides) > 1:
        return None
    return known.get(ast.unparse(operand.node)) or getattr(values, f"Q{number}A", None)


def _check_total(operand: Operand, source: SourceFile) -> None:
    """Require that the operand is a tensor in other runs too, without side effects."""
    if not is_total(operand.node, source, is_guard):
        raise FixRefused(
            f"`{ast.unparse(operand.node)[:60]}` may have a side effect, or be a Python value in another "
            "run. Assign it to a name before"
        )


def used_as_tensors(node: ast.AST, source: SourceFile) -> set[str]:
    """Return the names and attributes in a value that must be tensors, by their methods or functions of
    torch.
    """
    found = set()
    for call in (one for one in ast.walk(node) if isinstance(one, ast.Call)):
        of_torch = (source.dotted(call.func) or "").startswith("torch.")
        owner = [call.func.value] if isinstance(call.func, ast.Attribute) else []
        found |= {ast.unparse(one) for one in (call.args if of_torch else owner)}
    return found


def _no_tensor(condition: ast.expr, *, alone: bool) -> str:
    """Return why an operand that is a Python value is refused: it may have been read from a tensor."""
    for node in ast.walk(condition):
        if isinstance(node, ast.Call) and (read := _read_by(node)) is not None:
            return (
                f"its condition reads `{ast.unparse(node)[:60]}` on the host before the comparison. "
                f"Compare `{read[:60]}` itself, so that the device can choose"
            )
    if alone:
        return "its condition is not a tensor, so it needs no host-device sync"
    return (
        f"`{ast.unparse(condition)[:60]}` in its condition is a Python value. Test it in an `if` of its own, "
        "around one for the rest"
    )


def _read_by(call: ast.Call) -> str | None:
    """Return the argument that a call such as `float(x)` or `x.item()` reads on the host."""
    if isinstance(call.func, ast.Name) and call.func.id in ("float", "int", "bool") and call.args:
        return ast.unparse(call.args[0])
    if isinstance(call.func, ast.Attribute) and call.func.attr in ("item", "tolist"):
        return ast.unparse(call.func.value)
    return None


def as_tensor(condition: ast.expr, source: SourceFile, numeric: Collection[int]) -> str:
    """Return the condition's text for tensor operands; `numeric` are the indices of non-booleans."""
    numbers = iter(range(len(operands(condition))))
    return _text(condition, source, numeric, numbers)


def _text(
    node: ast.expr, source: SourceFile, numeric: Collection[int], numbers: Iterator[int]
) -> str:
    if isinstance(node, ast.BoolOp):
        sign = " & " if isinstance(node.op, ast.And) else " | "
        return sign.join(_within(one, source, numeric, numbers) for one in node.values)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        return f"~{_within(node.operand, source, numeric, numbers)}"
    if _is_chain(node):
        links = [_link(one, source) for one in _links(node) if next(numbers) >= 0]
        return " & ".join(f"({one})" for one in links)
    return f"{atom(source, node)} != 0" if next(numbers) in numeric else source.segment(node)


def _within(
    node: ast.expr, source: SourceFile, numeric: Collection[int], numbers: Iterator[int]
) -> str:
    text = _text(node, source, numeric, numbers)
    return text if text == source.segment(node) == atom(source, node) else f"({text})"


def _link(operand: Operand, source: SourceFile) -> str:
    assert isinstance(operand.node, ast.Compare)
    left, right = (atom(source, one) for one in operand.sides)
    return f"{left} {_COMPARED[type(operand.node.ops[0])]} {right}"
