"""A loop of `mask[i, :n] = True` over lengths becomes one comparison of positions with the lengths.

The host reads a bound on the device once for each row. `positions < lengths[:, None]` computes all rows at
once. It writes to the same memory, and only where the loop wrote. A negative length counts from the end, as
in a slice.

Refused if the loop does more, if its variables are read after it, and if the value cannot fill.
Lengths are assumed to be real numbers, as in the observed run.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import NamedTuple

from torchtrim.rewriter.dense import widened
from torchtrim.rewriter.fix import Fix, Match, TextEdit, Writing
from torchtrim.rewriter.replace import fresh, need_indentation, torch_of
from torchtrim.source.facts import (
    Facts,
    FixRefused,
    Values,
    are_lengths,
    is_floating,
    is_number,
    is_tensor,
)
from torchtrim.source.forms import equal, match_form
from torchtrim.source.names import loads
from torchtrim.source.operations import is_pure, is_simple
from torchtrim.source.source import Function, SourceFile

_STORES = (
    ("M[I, :{}] = C", "<"),
    ("M[I, 0:{}] = C", "<"),
    ("M[I][:{}] = C", "<"),
    ("M[I, {}:] = C", ">="),
)
_COUNTS = ("range(len(L))", "range(L.shape[0])", "range(L.size(0))", "range(B)")


class _Loop(NamedTuple):
    """A loop `for ...: mask[row, :length] = value`. `rows`: their number, or None for all lengths."""

    node: ast.For
    mask: ast.expr
    lengths: ast.expr
    value: ast.expr
    sign: str
    rows: ast.expr | None
    names: tuple[str, ...]


def _find(source: SourceFile) -> Iterator[Match]:
    for node in source.each(ast.For):
        if found := _read(node, source):
            parts = {"X": found.mask, "L": found.lengths, "V": found.value}
            yield Match(fix=FIX, source=source, node=node.body[0], parts=parts, begin=node)


def _read(node: ast.For, source: SourceFile) -> _Loop | None:
    if len(node.body) != 1 or node.orelse:
        return None
    for form, sign in _STORES:
        for read in ("N.item()", "int(N)", "N"):
            if (bound := match_form(form.format(read), node.body[0], source)) is not None:
                return _of_parts(node, source, bound.parts, sign)
    return None


def _of_parts(
    node: ast.For, source: SourceFile, parts: dict[str, ast.expr], sign: str
) -> _Loop | None:
    index, length, mask, value = (parts[name] for name in "INMC")
    if not isinstance(index, ast.Name):
        return None
    enumerated = match_form("enumerate(L)", node.iter, source)
    if enumerated is not None and isinstance(length, ast.Name):
        lengths, names = enumerated.parts["L"], (index.id, length.id)
        both = ast.unparse(node.target) == f"({index.id}, {length.id})"
        return _Loop(node, mask, lengths, value, sign, None, names) if both else None
    if not isinstance(length, ast.Subscript) or not equal(length.slice, index):
        return None
    for form in _COUNTS if equal(node.target, index) else ():
        counted = match_form(form, node.iter, source)
        if counted is not None and equal(counted.parts.get("L", length.value), length.value):
            return _Loop(node, mask, length.value, value, sign, counted.parts.get("B"), (index.id,))
    return None


def _write(match: Match, facts: Facts) -> Writing:
    source = match.source
    assert isinstance(match.begin, ast.For)
    found = _read(match.begin, source)
    assert found is not None
    _check(source, found)
    facts.need(
        f"`{match.text('L')}` is a one-dimensional integer tensor on the device of "
        f"`{match.text('X')}`",
        lambda v: not v.has("L") or (are_lengths(v.L) and v.L.device == v.X.device),
    )
    facts.need(
        f"`{match.text('V')}` is a Python number that `{match.text('X')}` can hold",
        lambda v: is_tensor(v.X) and len(v.X.shape) > 1 and is_number(v.V) and _can_hold(v),
    )
    rank = facts.only("the number of the mask's dimensions", lambda v: len(v.X.shape), 2)
    torch, imports = torch_of(source)
    blanks = need_indentation(source, found.node)
    text = f"{source.newline}{blanks}".join(_lines(match, found, torch, rank))
    return Writing((*imports, TextEdit.of(source, found.node, text)))


def _lines(match: Match, found: _Loop, torch: str, rank: int) -> list[str]:
    source = match.source
    mask, lengths = match.text("X"), match.text("L")
    lines = []
    if not is_simple(found.lengths):
        name = fresh(source, found.node, "lengths")
        lines.append(f"{name} = {lengths}")
        lengths = name
    rows, some = f"len({lengths})", lengths
    if found.rows is not None:
        rows = f"max({source.segment(found.rows)}, 0)"
        some = f"{lengths}[:{rows}]"
    ends = fresh(source, found.node, "ends" if found.sign == "<" else "starts")
    positions = fresh(source, found.node, "positions")
    lines += [
        f"{positions} = {torch}.arange({mask}.shape[1], device={mask}.device)",
        f"{ends} = {torch}.where({some} < 0, {some} + {mask}.shape[1], {some})",
    ]
    chosen = f"{positions} {found.sign} {ends}[:, None]"
    chosen = chosen if rank == 2 else widened(f"({chosen})", rank - 2)
    return [*lines, f"{mask}[:{rows}].masked_fill_({chosen}, {match.text('V')})"]


def _check(source: SourceFile, found: _Loop) -> None:
    function = source.function(found.node)
    for name in found.names:
        outside = len(loads(function, name)) > len(loads(found.node, name))
        if outside or not isinstance(function, Function):
            raise FixRefused(
                f"`{name}` is or may be read after the loop. Use another name in the loop"
            )
        if any(loads(part, name) for part in (found.value, found.mask, found.lengths)):
            raise FixRefused(f"`{name}` decides more than the row and how far it is filled")
    if not is_simple(found.mask) or not is_simple(found.value):
        raise FixRefused(
            "the target, or the value, is computed for each row. Assign it to a name first"
        )
    if not is_pure(found.lengths, source) or (found.rows is not None and not is_simple(found.rows)):
        raise FixRefused(
            "the expression of the lengths may have a side effect. Assign it to a name first"
        )


def _can_hold(values: Values) -> bool:
    return is_floating(values.X) or (values.V.kind in ("int", "bool") and values.X.dtype in _WHOLE)


_WHOLE = ("bool", "int64", "int32")

FIX = Fix(codes=("TT101",), equivalence="BITWISE", find=_find, write=_write)
