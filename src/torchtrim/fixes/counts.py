"""Counts of selected elements, computed at a fixed size."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from torchtrim.rewriter.fix import Fix, Match, TextEdit, Writing, of_forms
from torchtrim.rewriter.reads import (
    bounds_of,
    need_tensor_uses,
    need_wide_uses,
    with_companions,
)
from torchtrim.rewriter.replace import atom, filled, fresh, insert_before, instead, replace
from torchtrim.source.facts import Facts, FixRefused, is_integral, is_mask, is_number, is_tensor
from torchtrim.source.selections import mask_of_index
from torchtrim.source.source import SourceFile

_SELECTIONS = ("torch.masked_select(X, M)", "X.masked_select(M)", "X[M, :]", "X[M]")
_INDICES = ("X.nonzero()", "torch.nonzero(X)", "torch.argwhere(X)", "X.argwhere()")
_TUPLES = (
    "X.nonzero(as_tuple=True)[0]",
    "torch.nonzero(X, as_tuple=True)[0]",
    "torch.where(X)[0]",
)
_LENGTHS = ("len({})", "{}.shape[0]", "{}.size(0)", "{}.numel()")
_SELECTED = (*_TUPLES, *_INDICES, *_SELECTIONS)
_PLAIN = [text.format(one) for text in _LENGTHS for one in _SELECTED]
_LEAST = [form for one in _PLAIN for form in (f"max({one}, C)", f"max(C, {one})")]


def _once(source: SourceFile) -> Iterator[Match]:
    counts = with_companions(of_forms(lambda: MASKED_COUNT, *_LEAST, *_PLAIN), bounded=True)
    masked = [
        match
        for match in counts(source)
        if "M" not in match.parts or mask_of_index(match.parts["M"]) is not None
    ]
    nodes = {match.node for match in masked}
    yield from (match for match in masked if not nodes.intersection(source.around(match.node)))


def _masked(match: Match, facts: Facts) -> Writing:
    text = _of_mask(match, facts) if "M" in match.parts else _of_nonzero(match, facts)
    if "C" in match.parts:
        match.need(facts, "C", "is a Python integer", lambda seen: seen.kind == "int")
        least = "C" if isinstance(match.parts["C"], ast.Constant) else "int(C)"
        text = f"({text}).clamp(min={least})" if "*" in text else f"{text}.clamp(min={least})"
    need_tensor_uses(match, facts, "M" if "M" in match.parts else "X", bounded=True)
    need_wide_uses(match, facts)
    edits = replace(match, text, {"X": "values", "M": "kept"})
    bounds = [_clamped(match.source, call) for call in bounds_of(match)]
    return Writing((*edits, *bounds))


def _clamped(source: SourceFile, call: ast.Call) -> TextEdit:
    """Return the edit that clamps the count on the device, where its name is used."""
    name, number = sorted(call.args, key=lambda one: isinstance(one, ast.Constant))
    return TextEdit.of(source, call, f"{source.segment(name)}.clamp(min={source.segment(number)})")


def _of_mask(match: Match, facts: Facts) -> str:
    flat = "masked_select" in match.form
    facts.need(
        f"`{match.text('M')}` is a boolean mask whose shape starts that of `{match.text('X')}`",
        lambda v: (
            is_mask(v.M, v.X) and (not flat or (v.M.shape == v.X.shape and 1 not in v.M.shape))
        ),
    )
    if flat:
        return "torch.broadcast_to(M, torch.broadcast_shapes(X.shape, M.shape)).sum()"
    return "M.sum() * X.shape[M.dim():].numel()" if ".numel()" in match.form else "M.sum()"


def _of_nonzero(match: Match, facts: Facts) -> str:
    match.need(facts, "X", "is a tensor", is_tensor)
    tuples = "[0]" in match.form.replace(".shape[0]", "")
    if ".numel()" not in match.form or tuples:
        facts.need(f"`{match.text('X')}` has a dimension", lambda v: bool(v.X.shape))
        return "torch.count_nonzero(X)"
    return "torch.count_nonzero(X) * X.dim()"


MASKED_COUNT: Fix = Fix(
    name="masked_count",
    doc="""`len(x[mask])`, `mask.nonzero().size(0)` and similar counts become `mask.sum()`, a tensor on the
    device.

    Counting the elements that a mask selects does not require selecting them. The count becomes a tensor, so
    the fix applies only if it is used as one: in arithmetic with tensors of float32 or float64, such as a
    normalizer that the host never needs; `max(len(x[mask]), 1)` becomes `mask.sum().clamp(min=1)`. A device
    divides by a Python number through its reciprocal, so a quotient agrees up to rounding.

    Refused if the count is needed as a Python number: as a size, a bound or a condition, or if it leaves the
    function.
    """,
    codes=("TT102",),
    equivalence="ROUNDING",
    find=_once,
    write=_masked,
)


_DISTINCT = "(X.flatten().sort().values.diff() != 0).sum() + (X.numel() > 0)"
_BUT_ONE = "((V.diff(prepend=~V[:1]) != 0) & (V != C)).sum()"
_UNIQUE_COUNTS = [
    text.format(one) for text in _LENGTHS for one in ("torch.unique(X)", "X.unique()")
]
_UNIQUE_BUT_ONE = ("(torch.unique(X) != C).sum()", "(X.unique() != C).sum()")


def _distinct(match: Match, facts: Facts) -> Writing:
    match.need(facts, "X", "is a tensor of integers", is_integral)
    but_one = "C" in match.parts
    if but_one:
        match.need(facts, "C", "is a Python number", is_number)
    else:
        need_tensor_uses(match, facts, "X")
        need_wide_uses(match, facts)
    edits = _but_one(match) if but_one else replace(match, _DISTINCT, {"X": "values"})
    return Writing(edits)


def _but_one(match: Match) -> tuple[TextEdit, ...]:
    source, node = match.source, match.node_as(ast.Call)
    flat = fresh(source, node, "flat")
    before = f"{flat} = {atom(source, match.parts['X'])}.flatten().sort().values"
    text, _ = filled(match, _BUT_ONE, {"V": flat})
    return insert_before(source, node, before), instead(source, node, text)


DISTINCT_COUNT: Fix = Fix(
    name="distinct_count",
    doc="""`torch.unique(x).numel()` and `(torch.unique(x) != c).sum()` count by sorting, at a fixed size.

    The result of `unique` has as many elements as there are distinct values, so the host waits to learn how
    many. After sorting, a value is distinct if it differs from the one before it; the count is a tensor of
    fixed shape. Only for integers: with floating-point numbers, `inf - inf` would count as a difference.

    The count becomes a tensor on the device. The fix applies only if it is used as a tensor, together with
    tensors of float32 or float64: 16 bits would round it.
    """,
    codes=("TT102",),
    equivalence="BITWISE",
    find=with_companions(of_forms(lambda: DISTINCT_COUNT, *_UNIQUE_BUT_ONE, *_UNIQUE_COUNTS)),
    write=_distinct,
)


_KNOWN = ("torch.bincount(X, minlength=K)", "X.bincount(minlength=K)")
_WEIGHTED = (
    "torch.bincount(X, W, K)",
    "torch.bincount(X, W, **REST)",
    "torch.bincount(X, weights=W, **REST)",
    "X.bincount(W, **REST)",
    "X.bincount(weights=W, **REST)",
)
_UNKNOWN = ("torch.bincount(X)", "X.bincount()")
_BINS = (
    "torch.zeros(K, dtype=torch.int64, device=X.device)"
    ".scatter_add_(0, X.long(), torch.ones_like(X, dtype=torch.int64))"
)


def _counted(match: Match, facts: Facts) -> Writing:
    if match.form in _UNKNOWN:
        raise FixRefused(
            "the data decides its length. For k values: `torch.zeros(k).scatter_add_(0, x, "
            "torch.ones_like(x))`"
        )
    if match.form in _WEIGHTED:
        raise FixRefused(
            "it gives integers for an empty input, else floats. For k values: "
            "`torch.zeros(k).scatter_add_(0, x, w)`"
        )
    facts.need(
        f"`{match.text('X')[:60]}` is a one-dimensional integer tensor",
        lambda v: is_integral(v.X) and v.X.dtype != "bool" and len(v.X.shape) == 1,
    )
    match.need(facts, "K", "is a Python integer", lambda seen: seen.kind == "int")
    return Writing(
        replace(match, _BINS, {"X": "values", "K": "places"}),
        risk=f"a value of `{match.text('K')[:40]}` or more would make the original's result longer, and is "
        "an error here. Apply the fix if all values are below",
    )


COUNTED_VALUES: Fix = Fix(
    name="counted_values",
    doc="""`torch.bincount(x, minlength=k)` becomes a scatter into k places if all values are known to be
    below k.

    `bincount` needs the smallest and the largest value, and the host waits twice, even with `minlength`. A
    scatter into k places does not, but raises an error for a value of k or more, which would have made the
    result longer. No run can show that all values are below k: the fix is suggested, not applied.

    Refused without `minlength`, since the length depends on the data, and with weights: for an empty input
    `bincount` then returns integers, which no other form does.
    """,
    codes=("TT101", "TT102"),
    equivalence="BITWISE",
    find=of_forms(lambda: COUNTED_VALUES, *_KNOWN, *_UNKNOWN, *_WEIGHTED),
    write=_counted,
)


FIXES = (COUNTED_VALUES, DISTINCT_COUNT, MASKED_COUNT)
