"""Reads and assignments by an index of zero dimensions."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import replace as changed

from torchtrim.records.probes import ObservedValue
from torchtrim.rewriter.dense import hoisted
from torchtrim.rewriter.fix import Fix, Match, TextEdit, Writing, of_forms
from torchtrim.rewriter.replace import atom, replace
from torchtrim.source.facts import (
    Facts,
    FixRefused,
    Values,
    is_floating,
    is_number,
    is_tensor,
    of_part,
)
from torchtrim.source.names import only_reads_at
from torchtrim.source.nodes import find_all, method_of
from torchtrim.source.numbers import is_known_number
from torchtrim.source.operations import is_pure
from torchtrim.source.source import SourceFile
from torchtrim.syncs.lookup import is_from

_PLAIN = (ast.Slice, ast.Constant, ast.Starred, ast.Compare, ast.List)
_INDICES = ("int64", "int32", "int16", "int8")


def _find_index_assignment(source: SourceFile) -> Iterator[Match]:
    if is_from("2.15"):
        return
    for node in source.each(ast.Assign):
        target, value = node.targets[0], node.value
        value = value.body if isinstance(value, ast.IfExp) else value
        if len(node.targets) > 1 or not isinstance(target, ast.Subscript):
            continue
        given = target.slice.elts if isinstance(target.slice, ast.Tuple) else [target.slice]
        indices = [index for index in given if not isinstance(index, _PLAIN)]
        # This fix itself writes `new_full`.
        if indices and not method_of(value).startswith("new_"):
            parts = {"X": target.value, "V": node.value}
            parts |= {f"I{number}": index for number, index in enumerate(indices)}
            syncs = (target,)
            yield Match(fix=INDEX_ASSIGNMENT, source=source, node=node, parts=parts, syncs=syncs)


def _write_index_assignment(match: Match, facts: Facts) -> Writing:
    node, source, tensor = match.node_as(ast.Assign), match.source, match.parts["X"]
    assert isinstance(node.targets[0], ast.Subscript)
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
    if uploaded := next(find_all(node.targets[0].slice, ast.List), None):
        raise FixRefused(
            f"`{source.segment(uploaded)[:60]}` is uploaded to serve as an index, which waits in any form. "
            "First make it a tensor on the device once, or a slice"
        )
    if not is_pure(tensor, source) or not is_pure(node.value, source):
        raise FixRefused("the expression may have a side effect. Assign it to a name first")
    target, before = hoisted(source, tensor, "target", at=node)
    value = TextEdit.of(source, node.value, f"{target}.new_full((), {match.text('V')})")
    renamed = [TextEdit.of(source, tensor, target)] if before else []
    indices = [edit for name in names for edit in _with_dimension(match, facts, name)]
    return Writing((*before, *renamed, *indices, value))


def _with_dimension(match: Match, facts: Facts, name: str) -> Iterator[TextEdit]:
    """Yield the edit that gives an index a dimension."""
    source, node = match.source, match.parts[name]
    if not facts.holds(of_part(name, _is_single)):
        text = f"`{match.text(name)}` has dimensions"
        facts.need(text, of_part(name, lambda seen: not _is_single(seen)))
        return
    if not is_pure(node, source):
        raise FixRefused("the index may have a side effect. Assign it to a name first")
    text = atom(source, node)
    kind = facts.only(f"the type of `{text}`", lambda v: str(getattr(v, name).dtype), "int64")
    index = text if kind in _INDICES[:2] else f"{text}.long()"
    yield TextEdit.of(source, node, f"{index}[None]")


def _is_single(value: ObservedValue) -> bool:
    return is_tensor(value) and not value.shape


def _holds(values: Values) -> bool:
    whole = values.V.kind in ("int", "bool") and values.X.dtype in ("int64", "int32")
    return is_floating(values.X) or whole or (values.V.kind == "bool" and values.X.dtype == "bool")


def _are_indices(values: Values, names: list[str]) -> bool:
    seen = [getattr(values, name) for name in names]
    tensors = [one for one in seen if is_tensor(one)]
    others = {one.kind for one in seen if not is_tensor(one)}
    return (
        others <= {"int", "NoneType", "ellipsis", "slice"}
        and bool(tensors)
        and all(one.dtype in _INDICES and one.device == values.X.device for one in tensors)
    )


INDEX_ASSIGNMENT: Fix = Fix(
    name="index_assignment",
    doc="""`x[index] = 1.0` becomes `x[index] = x.new_full((), 1.0)`, whose value is created on the device.

    An assignment of a Python number by indices on the device creates a tensor of the number on the host and
    uploads it, and the upload is a host-device sync. `new_full` creates it on the tensor's device, with the
    tensor's type. The host would read an index of zero dimensions, so it gets one: `x[index[None]]`. The same
    memory is written, even if an index is repeated.

    Refused for a boolean mask, which uploads nothing, and if the number would be truncated. Without a run,
    the source has to show that the value is a number and the target a tensor. From 2.15 on, torch does this
    itself, and the fix writes nothing.
    """,
    codes=("TT103", "TT101", "TT102"),
    equivalence="BITWISE",
    find=_find_index_assignment,
    write=_write_index_assignment,
)


_RISK = "an index out of bounds becomes a device-side error, after which the process cannot use the device"


def _find_row_by_index(source: SourceFile) -> Iterator[Match]:
    plain = ast.Constant | ast.Slice | ast.Tuple | ast.UnaryOp | ast.List
    for match in of_forms(lambda: ROW_BY_INDEX, "X[I.item()]", "X[int(I)]", "X[I]")(source):
        assert isinstance(match.node, ast.Subscript)
        if isinstance(match.node.ctx, ast.Load) and not isinstance(match.node.slice, plain):
            yield changed(match, syncs=(match.node.slice,))


def _write_row_by_index(match: Match, facts: Facts) -> Writing:
    facts.need(
        f"`{match.text('I')[:60]}` is one 64-bit integer on the device of tensor `{match.text('X')[:60]}`",
        _fits,
        static=lambda v: _known_statically(v, read=match.form != "X[I]", cast="int(" in match.form),
    )
    if not only_reads_at(match.source, match.node):
        raise FixRefused("it may be written to, and is a view of the whole. Use `.clone()`")
    return Writing(replace(match, "X[I.view(1)][0]"), risk=_RISK)


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

    Without a run, the source has to show that the first is a tensor, and the second an integer tensor that
    has no dimensions or is read here.

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
