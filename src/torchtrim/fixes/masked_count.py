"""`len(x[mask])`, `mask.nonzero().size(0)` and their like become `mask.sum()`, a tensor on the device.

To know how many elements a mask selects, nothing needs to be selected. The count is then a tensor, and
it is written only where it is used as one: in arithmetic with tensors of float32 or float64, so that a
normaliser never comes to the host; `max(len(x[mask]), 1)` becomes `mask.sum().clamp(min=1)`. A device
divides by a number of the host through its reciprocal, so a quotient agrees but for rounding.

Refused where the count is needed as a number of Python's: as a size, a bound, a condition, or where it
leaves the function. Types and ranks that were seen are tested for, which needs no sync; for others the
original is kept.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

from torchtrim.rewriter.fix import Edit, Fix, Match, Writing, of_forms
from torchtrim.rewriter.guarded import for_names_seen, with_names
from torchtrim.rewriter.replace import replace
from torchtrim.rewriter.tensor_uses import (
    bounds_of,
    need_tensor_uses,
    need_wide_uses,
    with_companions,
)
from torchtrim.source.facts import Facts, is_mask, is_tensor
from torchtrim.source.selections import mask_of_index
from torchtrim.source.source import Source

_SELECTIONS = ("torch.masked_select(X, M)", "X.masked_select(M)", "X[M, :]", "X[M]")
_INDICES = ("X.nonzero()", "torch.nonzero(X)", "torch.argwhere(X)", "X.argwhere()")
_TUPLES = (
    "X.nonzero(as_tuple=True)[0]",
    "torch.nonzero(X, as_tuple=True)[0]",
    "torch.where(X)[0]",
)
_LENGTHS = ("len({})", "{}.shape[0]", "{}.size(0)")
_ALL = "{}.numel()"
_ROWS = [text.format(one) for one in (*_TUPLES, *_INDICES, *_SELECTIONS) for text in _LENGTHS]
_ROWS += [_ALL.format(one) for one in _TUPLES]
_ELEMENTS = [_ALL.format(one) for one in (*_INDICES, *_SELECTIONS)]
_PLAIN = (*_ROWS, *_ELEMENTS)
_LEAST = tuple(form for one in _PLAIN for form in (f"max({one}, C)", f"max(C, {one})"))


def _forms(source: Source) -> Iterator[Match]:
    return of_forms(lambda: FIX, *_LEAST, *_PLAIN)(source)


_find = with_companions(_forms, bounded=True)


def _once(source: Source) -> Iterator[Match]:
    found = [
        match
        for match in _find(source)
        if "M" not in match.parts or mask_of_index(match.parts["M"]) is not None
    ]
    nodes = {match.node for match in found}
    yield from (match for match in found if not nodes.intersection(source.around(match.node)))


def find(source: Source) -> Iterator[Match]:
    """The counts, each once, with what is made of it."""
    return with_names(_once)(source)


def write(match: Match, facts: Facts) -> Writing:
    """The count, on the device."""
    text = _of_mask(match, facts) if "M" in match.parts else _of_nonzero(match, facts)
    if "C" in match.parts:
        facts.need(
            f"`{match.text('C')}` is a whole number of Python's", lambda v: v.C.kind == "int"
        )
        least = "C" if isinstance(match.parts["C"], ast.Constant) else "int(C)"
        text = f"({text}).clamp(min={least})" if "*" in text else f"{text}.clamp(min={least})"
    need_tensor_uses(match, facts, "M" if "M" in match.parts else "X", bounded=True)
    need_wide_uses(match, facts)
    edits = replace(match, text, {"X": "values", "M": "kept"})
    bounds = [_clamped(match.source, call) for call in bounds_of(match)]
    deciding = [part for part in match.parts if part == "M" or part.startswith("WITH")]
    return Writing(for_names_seen(match, facts, [*edits, *bounds], deciding))


def _clamped(source: Source, call: ast.Call) -> Edit:
    """The edit that bounds the count on the device, where it is used by its name."""
    name, number = sorted(call.args, key=lambda one: isinstance(one, ast.Constant))
    text = f"{source.segment(name)}.clamp(min={source.segment(number)})"
    return Edit(source.start(call), source.end(call), text)


def _of_mask(match: Match, facts: Facts) -> str:
    flat = "masked_select" in match.form
    facts.need(
        f"`{match.text('M')}` is a boolean mask of the shape that `{match.text('X')}` begins with",
        lambda v: (
            is_mask(v.M, v.X) and (not flat or (v.M.shape == v.X.shape and 1 not in v.M.shape))
        ),
    )
    if flat:
        return "torch.broadcast_to(M, torch.broadcast_shapes(X.shape, M.shape)).sum()"
    return "M.sum() * X.shape[M.dim():].numel()" if ".numel()" in match.form else "M.sum()"


def _of_nonzero(match: Match, facts: Facts) -> str:
    facts.need(f"`{match.text('X')}` is a tensor", lambda v: is_tensor(v.X))
    tuples = "[0]" in match.form.replace(".shape[0]", "")
    if ".numel()" not in match.form or tuples:
        facts.need(f"`{match.text('X')}` has a dimension", lambda v: bool(v.X.shape))
        return "torch.count_nonzero(X)"
    return "torch.count_nonzero(X) * X.dim()"


FIX: Fix = Fix(
    codes=("TT102",),
    equivalence="ROUNDING",
    find=find,
    write=write,
)
