"""`x[index] = 1.0` becomes `x[index] = x.new_full((), 1.0)`, whose value is made on the device.

An assignment of a Python number by indices that lie on the device makes a tensor of the number on the
host and uploads it, and the upload is a host-device sync. `new_full` makes it where the tensor is, with
the tensor's own type. An index of no dimensions, which would be read by the host, is given one:
`x[index[None]]`. Where a type decides what is right, the one that was seen is tested for. The same memory is
written, however often an index is repeated.

Refused for a boolean mask, which does not upload, and where the number would be cut to fit. Without a run
the source has to say that the value is a number and what it is assigned to a tensor. From 2.15 on torch does
so itself, and nothing is written.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

from torchtrim.records.seen import Seen
from torchtrim.rewriter.dense import hoisted
from torchtrim.rewriter.fix import Edit, Fix, Match, Writing
from torchtrim.rewriter.replace import atom, check_comments, torch_of
from torchtrim.source.facts import Facts, Refused, Values, is_floating, is_number, is_tensor
from torchtrim.source.numbers import is_known_number
from torchtrim.source.purity import is_pure
from torchtrim.source.source import Source
from torchtrim.syncs.lookup import is_from

_INDICES = ("int64", "int32", "int16", "int8")


def find(source: Source) -> Iterator[Match]:
    """The assignments by an index that is computed; none where torch uploads no number."""
    if is_from("2.15"):
        return
    for node in source.each(ast.Assign):
        if len(node.targets) == 1:
            target = node.targets[0]
            indices = _indices(target)
            if isinstance(target, ast.Subscript) and indices and not _is_made(node.value):
                parts = {"X": target.value, "V": node.value}
                parts |= {f"I{number}": index for number, index in enumerate(indices)}
                yield Match(fix=FIX, source=source, node=node, parts=parts, syncs=(target,))


def _is_made(value: ast.expr) -> bool:
    """Whether the value is a tensor that is made there, as this fix writes it."""
    value = value.body if isinstance(value, ast.IfExp) else value
    makes = isinstance(value, ast.Call) and isinstance(value.func, ast.Attribute)
    return makes and value.func.attr.startswith("new_")  # type: ignore[attr-defined]


def _indices(target: ast.expr) -> list[ast.expr]:
    """What of an index may be a tensor."""
    if not isinstance(target, ast.Subscript):
        return []
    given = target.slice.elts if isinstance(target.slice, ast.Tuple) else [target.slice]
    plain = (ast.Slice, ast.Constant, ast.Starred, ast.Compare, ast.List)
    return [one for one in given if not isinstance(one, plain)]


def write(match: Match, facts: Facts) -> Writing:
    """The same number, made on the device."""
    node, source = match.node, match.source
    assert isinstance(node, ast.Assign)
    names = [name for name in match.parts if name.startswith("I")]
    facts.need(
        f"`{match.text('V')[:60]}` is a number of Python's that `{match.text('X')}` can hold",
        lambda v: is_tensor(v.X) and is_number(v.V) and _holds(v),
        told=lambda v: is_tensor(v.X) and is_known_number(match.parts["V"], match.source),
    )
    facts.need(
        "it is indexed by whole numbers that lie on the same device, and by no mask",
        lambda v: _are_indices(v, names),
    )
    assert isinstance(node.targets[0], ast.Subscript)
    if lists := [one for one in ast.walk(node.targets[0].slice) if isinstance(one, ast.List)]:
        raise Refused(
            f"`{source.segment(lists[0])[:60]}` is uploaded to be an index, which waits whatever is written. "
            "Make it a tensor on the device once, or a slice, first"
        )
    if not is_pure(match.parts["X"], source) or not is_pure(node.value, source):
        raise Refused("the expression there may do more than compute a value. Give it a name first")
    target, before = hoisted(source, match.parts["X"], "target", at=node)
    made, imports = _made(match, facts, target)
    value = Edit(source.start(node.value), source.end(node.value), made)
    tensor = match.parts["X"]
    renamed = [Edit(source.start(tensor), source.end(tensor), target)] if before else []
    edits = (*before, *imports, *renamed, *_with_dimensions(match, facts, names), value)
    check_comments(source, edits)
    return Writing(edits)


def _made(match: Match, facts: Facts, target: str) -> tuple[str, tuple[Edit, ...]]:
    """The number on the device; as it is where the tensor is of another type, which might not hold it."""
    text, value = f"{target}.new_full((), {match.text('V')})", match.parts["V"]
    if isinstance(value, ast.Constant) and value.value in range(128):
        return text, ()
    torch, imports = torch_of(match.source)
    kind = facts.only(f"the type of `{target}`", lambda v: v.X.dtype, "")
    return (
        f"{text} if {target}.dtype == {torch}.{kind} else {match.text('V')}" if kind else text
    ), imports


def _with_dimensions(match: Match, facts: Facts, names: list[str]) -> Iterator[Edit]:
    """The edits that give a dimension to each index that has none."""
    for name in names:
        if facts.holds(lambda v, name=name: _is_single(getattr(v, name))):  # type: ignore[misc]
            yield from _with_dimension(match, facts, name)
        else:
            facts.need(
                f"`{match.text(name)}` has dimensions",
                lambda v, name=name: not _is_single(getattr(v, name)),  # type: ignore[misc]
            )


def _with_dimension(match: Match, facts: Facts, name: str) -> Iterator[Edit]:
    """The index with a dimension, for the type that was seen: of another type it may be a mask, or none."""
    source, node = match.source, match.parts[name]
    if not is_pure(node, source):
        raise Refused("the index there may do more than compute a value. Give it a name first")
    torch, imports = torch_of(source)
    yield from imports
    text = atom(source, node)
    kind = facts.only(f"the type of `{text}`", lambda v: str(getattr(v, name).dtype), "int64")
    made = text if kind in _INDICES[:2] else f"{text}.long()"
    new = f"{made}[None] if {text}.dtype == {torch}.{kind} else {source.segment(node)}"
    yield Edit(source.start(node), source.end(node), new)


def _is_single(value: Seen) -> bool:
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


FIX = Fix(codes=("TT103", "TT101", "TT102"), equivalence="BITWISE", find=find, write=write)
