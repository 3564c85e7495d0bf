"""Reads and assignments by an index of zero dimensions."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from torchtrim.records.probes import ObservedValue
from torchtrim.rewriter.dense import hoisted
from torchtrim.rewriter.fix import Fix, Match, TextEdit, Writing
from torchtrim.rewriter.guarded import for_kinds_seen
from torchtrim.rewriter.replace import atom, check_comments, replace, torch_of
from torchtrim.source.facts import (
    Facts,
    FixRefused,
    Values,
    is_floating,
    is_number,
    is_tensor,
    of_part,
)
from torchtrim.source.forms import match_form
from torchtrim.source.names import only_reads_at
from torchtrim.source.numbers import is_known_number
from torchtrim.source.operations import is_pure
from torchtrim.source.source import SourceFile
from torchtrim.syncs.lookup import is_from

_INDICES = ("int64", "int32", "int16", "int8")


def _find_index_assignment(source: SourceFile) -> Iterator[Match]:
    if is_from("2.15"):
        return
    for node in source.each(ast.Assign):
        if len(node.targets) == 1:
            target = node.targets[0]
            indices = _indices(target)
            if isinstance(target, ast.Subscript) and indices and not _is_made(node.value):
                parts = {"X": target.value, "V": node.value}
                parts |= {f"I{number}": index for number, index in enumerate(indices)}
                yield Match(
                    fix=INDEX_ASSIGNMENT, source=source, node=node, parts=parts, syncs=(target,)
                )


def _is_made(value: ast.expr) -> bool:
    """Return True if the value is a tensor created there, as this fix writes it."""
    value = value.body if isinstance(value, ast.IfExp) else value
    makes = isinstance(value, ast.Call) and isinstance(value.func, ast.Attribute)
    return makes and value.func.attr.startswith("new_")  # type: ignore[attr-defined]


def _indices(target: ast.expr) -> list[ast.expr]:
    if not isinstance(target, ast.Subscript):
        return []
    given = target.slice.elts if isinstance(target.slice, ast.Tuple) else [target.slice]
    plain = (ast.Slice, ast.Constant, ast.Starred, ast.Compare, ast.List)
    return [one for one in given if not isinstance(one, plain)]


def _write_index_assignment(match: Match, facts: Facts) -> Writing:
    node, source = match.node, match.source
    assert isinstance(node, ast.Assign)
    names = [name for name in match.parts if name.startswith("I")]
    facts.need(
        f"`{match.text('V')[:60]}` is a Python number that `{match.text('X')}` can hold",
        lambda v: is_tensor(v.X) and is_number(v.V) and _holds(v),
        static=lambda v: is_tensor(v.X) and is_known_number(match.parts["V"], match.source),
    )
    facts.need(
        "its indices are integers on the same device, not masks",
        lambda v: _are_indices(v, names),
    )
    assert isinstance(node.targets[0], ast.Subscript)
    if lists := [one for one in ast.walk(node.targets[0].slice) if isinstance(one, ast.List)]:
        raise FixRefused(
            f"`{source.segment(lists[0])[:60]}` is uploaded to serve as an index, which waits in any form. "
            "First make it a tensor on the device once, or a slice"
        )
    if not is_pure(match.parts["X"], source) or not is_pure(node.value, source):
        raise FixRefused("the expression may have a side effect. Assign it to a name first")
    target, before = hoisted(source, match.parts["X"], "target", at=node)
    made, imports = _made(match, facts, target)
    value = TextEdit(source.start(node.value), source.end(node.value), made)
    tensor = match.parts["X"]
    renamed = [TextEdit(source.start(tensor), source.end(tensor), target)] if before else []
    edits = (*before, *imports, *renamed, *_with_dimensions(match, facts, names), value)
    check_comments(source, edits)
    return Writing(edits)


def _made(match: Match, facts: Facts, target: str) -> tuple[str, tuple[TextEdit, ...]]:
    """Return the number as a tensor on the device, guarded by the target's type, since another might
    not hold it.
    """
    text, value = f"{target}.new_full((), {match.text('V')})", match.parts["V"]
    if isinstance(value, ast.Constant) and value.value in range(128):
        return text, ()
    torch, imports = torch_of(match.source)
    kind = facts.only(f"the type of `{target}`", lambda v: v.X.dtype, "")
    return (
        f"{text} if {target}.dtype == {torch}.{kind} else {match.text('V')}" if kind else text
    ), imports


def _with_dimensions(match: Match, facts: Facts, names: list[str]) -> Iterator[TextEdit]:
    """Return the edits that give a dimension to each index without one."""
    for name in names:
        if facts.holds(of_part(name, _is_single)):
            yield from _with_dimension(match, facts, name)
        else:
            facts.need(
                f"`{match.text(name)}` has dimensions",
                of_part(name, lambda seen: not _is_single(seen)),
            )


def _with_dimension(match: Match, facts: Facts, name: str) -> Iterator[TextEdit]:
    """Return the index with a dimension, guarded by its type: with another type it may be a mask."""
    source, node = match.source, match.parts[name]
    if not is_pure(node, source):
        raise FixRefused("the index may have a side effect. Assign it to a name first")
    torch, imports = torch_of(source)
    yield from imports
    text = atom(source, node)
    kind = facts.only(f"the type of `{text}`", lambda v: str(getattr(v, name).dtype), "int64")
    made = text if kind in _INDICES[:2] else f"{text}.long()"
    new = f"{made}[None] if {text}.dtype == {torch}.{kind} else {source.segment(node)}"
    yield TextEdit(source.start(node), source.end(node), new)


def _is_single(value: ObservedValue) -> bool:
    return is_tensor(value) and not value.shape


def _holds(values: Values) -> bool:
    whole = values.V.kind in ("int", "bool") and values.X.dtype in ("int64", "int32")
    return is_floating(values.X) or whole or (values.V.kind == "bool" and values.X.dtype == "bool")


def _are_indices(values: Values, names: list[str]) -> bool:
    found = [getattr(values, name) for name in names]
    tensors = [one for one in found if is_tensor(one)]
    others = all(
        is_tensor(one) or one.kind in ("int", "NoneType", "ellipsis", "slice") for one in found
    )
    return (
        others
        and bool(tensors)
        and all(one.dtype in _INDICES and one.device == values.X.device for one in tensors)
    )


INDEX_ASSIGNMENT: Fix = Fix(
    name="index_assignment",
    doc="""`x[index] = 1.0` becomes `x[index] = x.new_full((), 1.0)`, whose value is created on the device.

    An assignment of a Python number by indices on the device creates a tensor of the number on the host and
    uploads it, and the upload is a host-device sync. `new_full` creates it on the tensor's device, with the
    tensor's type. The host would read an index of zero dimensions, so it gets one: `x[index[None]]`. If a
    type decides what is right, the replacement tests for the observed one. The same memory is written, even
    if an index is repeated.

    Refused for a boolean mask, which uploads nothing, and if the number would be truncated. Without a run,
    the source has to show that the value is a number and the target a tensor. From 2.15 on, torch does this
    itself, and the fix writes nothing.
    """,
    codes=("TT103", "TT101", "TT102"),
    equivalence="BITWISE",
    find=_find_index_assignment,
    write=_write_index_assignment,
)


_FORMS = ("X[I.item()]", "X[int(I)]", "X[I]")
_RISK = "an index out of bounds becomes a device-side error, after which the process cannot use the device"


def _find_row_by_index(source: SourceFile) -> Iterator[Match]:
    for node in source.nodes:
        if not isinstance(node, ast.Subscript) or not isinstance(node.ctx, ast.Load):
            continue
        if isinstance(node.slice, ast.Constant | ast.Slice | ast.Tuple | ast.UnaryOp | ast.List):
            continue
        found = ((form, match_form(form, node, source)) for form in _FORMS)
        form, bound = next((one for one in found if one[1] is not None), ("", None))
        if bound is not None:
            at = (node.slice,)
            yield Match(
                fix=ROW_BY_INDEX, source=source, node=node, parts=bound.parts, form=form, syncs=at
            )


def _write_row_by_index(match: Match, facts: Facts) -> Writing:
    facts.need(
        f"`{match.text('I')[:60]}` is one 64-bit integer on the device of tensor `{match.text('X')[:60]}`",
        _fits,
        static=lambda v: _known_statically(v, read=match.form != "X[I]", cast="int(" in match.form),
    )
    if not only_reads_at(match.source, match.node):
        raise FixRefused("it may be written to, and is a view of the whole. Use `.clone()`")
    edits = replace(match, "X[I.view(1)][0]")
    return Writing(for_kinds_seen(match, facts, edits), risk=_RISK)


def _fits(values: Values) -> bool:
    table, index = values.X, values.I
    there = is_tensor(table, index) and index.device == table.device
    return there and index.dtype == "int64" and not index.shape and bool(table.shape)


def _known_statically(values: Values, *, read: bool, cast: bool) -> bool:
    """Return True if the source shows that the index has one element and is an integer."""
    index = values.I
    whole = (read and not cast) or index.dtype.startswith("int")
    return is_tensor(values.X, index) and whole and (read or not index.shape)


ROW_BY_INDEX: Fix = Fix(
    name="row_by_index",
    doc="""`table[t.item()]`, and `table[t]` with a tensor of zero dimensions, become `table[t.view(1)][0]`.

    PyTorch treats an index of zero dimensions as a number, which the host reads, with or without `.item()`.
    An index of one dimension stays on the device. So `alphas_cumprod[t]` in a sampler's loop does not wait.

    The values are the same; their memory layout may differ, which may change the rounding of a sum.

    The replacement tests for the observed ranks and types, and keeps the original for others. Without a run,
    the source has to show that the one is a tensor, and the other an integer tensor that has no dimensions or
    is read here.

    Applied only with `--unsafe-fixes`: an index out of bounds becomes a device-side error, after which the
    process cannot use the device. Refused if the row may be written to: the original is a view, this is a
    copy.
    """,
    codes=("TT101",),
    equivalence="ROUNDING",
    find=_find_row_by_index,
    write=_write_row_by_index,
)


FIXES = (INDEX_ASSIGNMENT, ROW_BY_INDEX)
