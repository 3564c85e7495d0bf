"""`torch.cat([x[mask], x[~mask]])` becomes a gather in a stable order, at a fixed size.

The selected rows come before the others, and both keep their order. That is a stable sort of the mask:
`x[torch.argsort((~mask).byte(), stable=True)]` has as many rows as `x`, which the host knows. With two
tensors, `torch.cat([x[mask], y[~mask]])` takes the rows of `torch.where(mask, x, y)`. With more pairs of a
mask and its inverse, all rows are concatenated and the selected ones come first. Rows only move: values and
gradients are identical, bit for bit.

Refused if the masks are not pairs of inverses, since the number of rows is unknown then, and if the tensors
differ in type.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

from torchtrim.rewriter.dense import hoisted, need_order, widened
from torchtrim.rewriter.fix import Fix, Match, TextEdit, Writing
from torchtrim.rewriter.replace import atom, instead, torch_of
from torchtrim.source.facts import Facts, Values, is_mask
from torchtrim.source.forms import equal
from torchtrim.source.nodes import constant_of, inverted
from torchtrim.source.selections import Selection, Tree, selection, syncs_of, tensor_part
from torchtrim.source.source import SourceFile

_NAMES = ("torch.cat", "torch.concat", "torch.concatenate")


def _find(source: SourceFile) -> Iterator[Match]:
    for node in source.each(ast.Call):
        if found := _read(node, source):
            parts = {tensor_part(n): one.tensor for n, one in enumerate(found)}
            parts |= {f"M{n}" if n else "M": one.mask for n, one in enumerate(found)}
            yield Match(fix=FIX, source=source, node=node, parts=parts, syncs=syncs_of(found))


def _read(node: ast.Call, source: SourceFile) -> list[Selection] | None:
    if source.dotted(node.func) not in _NAMES or not 1 <= len(node.args) <= 2:
        return None
    dims = [*node.args[1:], *(word.value for word in node.keywords if word.arg in ("dim", "axis"))]
    zero = all(constant_of(dim) == 0 for dim in dims)
    if not zero or len(dims) != len(node.args) - 1 + len(node.keywords):
        return None
    given = node.args[0]
    if not isinstance(given, ast.List | ast.Tuple) or len(given.elts) < 2:
        return None
    found = [selection(element, source) for element in given.elts]
    chosen = [one for one in found if one is not None and not one.flat]
    return chosen if len(chosen) == len(given.elts) and _pairs(chosen) is not None else None


def _pairs(chosen: list[Selection]) -> list[ast.expr] | None:
    """Return one mask of each pair of inverses, or None if one has no partner."""
    left = [one.mask for one in chosen]
    masks = []
    while left:
        mask = left.pop(0)
        if (partner := next((other for other in left if _inverse(mask, other)), None)) is None:
            return None
        left.remove(partner)
        masks.append(inverted(mask) or mask)
    return masks


def _inverse(one: ast.expr, other: ast.expr) -> bool:
    pairs = ((inverted(one), other), (inverted(other), one))
    return any(inner is not None and equal(inner, mask) for inner, mask in pairs)


def _write(match: Match, facts: Facts) -> Writing:
    source, node = match.source, match.node_as(ast.Call)
    chosen = _read(node, source)
    assert chosen is not None
    facts.need(
        "each mask is boolean, one-dimensional and as long as its tensor, and all tensors have one type, "
        "device and row shape",
        lambda v: _fit(v, len(chosen)),
    )
    need_order(source, Tree(chosen[0].mask, leaves=[(one, 0) for one in chosen]), hoisted=True)
    torch, imports = torch_of(source)
    if len(chosen) > 2:
        edits = (*imports, instead(source, node, _of_many(source, chosen, torch)))
    else:
        edits = (*imports, *_of_two(match, facts, chosen, torch))
    return Writing(edits)


def _of_two(
    match: Match, facts: Facts, chosen: list[Selection], torch: str
) -> tuple[TextEdit, ...]:
    source, node = match.source, match.node_as(ast.Call)
    first, second = chosen
    order = f"{torch}.argsort({atom(source, second.mask)}.byte(), stable=True)"
    if equal(first.tensor, second.tensor):
        return (instead(source, node, f"{atom(source, first.tensor)}[{order}]"),)
    mask, before = hoisted(source, first.mask, "kept", at=node)
    behind = facts.only("the number of dimensions", lambda v: len(v.X.shape) - 1, 0)
    given = f"{source.segment(first.tensor)}, {source.segment(second.tensor)}"
    text = f"{torch}.where({widened(mask, behind)}, {given})[{order}]"
    return (*before, instead(source, node, text))


def _of_many(source: SourceFile, chosen: list[Selection], torch: str) -> str:
    rows = ", ".join(source.segment(one.tensor) for one in chosen)
    left = ", ".join(
        source.segment(inner) if (inner := inverted(one.mask)) else f"~{atom(source, one.mask)}"
        for one in chosen
    )
    pairs = _pairs(chosen)
    assert pairs is not None
    length = " + ".join(f"len({source.segment(mask)})" for mask in pairs)
    order = f"{torch}.argsort({torch}.cat([{left}]).byte(), stable=True)[: {length}]"
    return f"{torch}.cat([{rows}])[{order}]"


def _fit(values: Values, many: int) -> bool:
    for number in range(many):
        tensor, mask = getattr(values, tensor_part(number)), getattr(values, f"M{number or ''}")
        row = (tensor.dtype, tensor.device, len(tensor.shape))
        alike = row == (values.X.dtype, values.X.device, len(values.X.shape))
        if not is_mask(mask, tensor) or len(mask.shape) != 1 or not alike:
            return False
    return True


FIX = Fix(codes=("TT102",), equivalence="BITWISE", find=_find, write=_write)
