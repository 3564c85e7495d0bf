"""Syncs that no other form of the code avoids: left unchanged, with a reason and an alternative."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import islice
from typing import NoReturn

from torchtrim.fixes import padding_mask, partition
from torchtrim.fixes.conditional_fill import fill_of
from torchtrim.fixes.counts import DISTINCT_COUNT, MASKED_COUNT
from torchtrim.fixes.masked_assignments import MASKED_ASSIGNMENT, MASKED_FILL
from torchtrim.fixes.masked_reductions import MASKED_CROSS_ENTROPY, MASKED_REDUCTION
from torchtrim.rewriter.fix import Fix, Match
from torchtrim.source.branches import branches
from torchtrim.source.facts import Facts, FixRefused, Values, is_tensor
from torchtrim.source.forms import match_form, places
from torchtrim.source.names import loads
from torchtrim.source.nodes import (
    called,
    constant_of,
    find_all,
    function_of,
    keywords_of,
    method_of,
    name_set,
)
from torchtrim.source.operations import is_total
from torchtrim.source.selections import mask_of_index, selection
from torchtrim.source.source import SourceFile

Place = tuple[ast.AST, Mapping[str, ast.expr], str]
"""A node, its parts and its form."""


def _refusal(
    name: str,
    code: str,
    doc: str,
    find: Callable[[SourceFile], Iterator[Place]],
    reason: Callable[[Match, Facts], str],
    others: Iterable[Fix] = (),
) -> Fix:
    """Return a fix that refuses each place, except those inside the matches of other fixes."""

    def found(source: SourceFile) -> Iterator[Match]:
        fixed = {
            part
            for other in others
            for match in other.places(source)
            for node in (match.node, match.begin or match.node)
            for part in ast.walk(node)
        }
        for node, parts, form in find(source):
            if node not in fixed:
                yield Match(fix=fix, source=source, node=node, parts=parts, form=form)

    def write(match: Match, facts: Facts) -> NoReturn:
        raise FixRefused(reason(match, facts))

    fix = Fix(name=name, doc=doc, codes=(code,), equivalence="BITWISE", find=found, write=write)
    return fix


_NONZERO = (
    "it has as many indices as true elements. Keep the mask, or bound it: "
    "`torch.nonzero_static(mask, size=n)`"
)
_UNIQUE = (
    "it has as many values as there are distinct ones. Compute for all k: `scatter_add_`, "
    "`one_hot(x, k)`, `torch.arange(k)`"
)
_CLASSES = (
    "the host reads the largest value. Pass the number of classes: `one_hot(x, num_classes=k)`"
)
_SHAPES = {
    "X.nonzero(**REST)": _NONZERO,
    "torch.nonzero(X, **REST)": _NONZERO,
    "torch.where(X)": _NONZERO,
    "X.argwhere()": _NONZERO,
    "torch.argwhere(X)": _NONZERO,
    "torch.unique(X, **REST)": _UNIQUE,
    "X.unique(**REST)": _UNIQUE,
    "torch.unique_consecutive(X, **REST)": _UNIQUE,
    "X.unique_consecutive(**REST)": _UNIQUE,
    "torch.nn.functional.one_hot(X)": _CLASSES,
}
_DRAWN = (
    "a fixed size makes other random draws. If they may differ, "
    "`torch.rand(m.shape).masked_fill(~m, -1).topk(k).indices` draws k"
)
_LOOPED = (
    "the loop runs once per distinct value. Loop over the known range, or `scatter_add_` by the "
    "values"
)


def _open_shapes(source: SourceFile) -> Iterator[Place]:
    for node, form, bound in places(_SHAPES, source):
        if not any(selection(outer, source) for outer in islice(source.around(node), 2)):
            yield node, bound.parts, form


def _why_open_shape(match: Match, facts: Facts) -> str:
    reason = _SHAPES[match.form]
    if reason == _NONZERO and _sizes_a_draw(match):
        return _DRAWN
    return _LOOPED if reason == _UNIQUE and _is_looped_over(match) else reason


def _sizes_a_draw(match: Match) -> bool:
    """Return True if a permutation or a random draw has the result's length."""
    source = match.source
    name = _assigned(match)
    return name is not None and any(
        (source.dotted(call.func) or "").startswith("torch.rand")
        and any(loads(argument, name) for argument in call.args)
        for call in find_all(source.function(match.node), ast.Call)
    )


def _assigned(match: Match) -> str | None:
    statement = match.source.statement(match.node)
    target = statement.targets[0] if isinstance(statement, ast.Assign) else None
    return target.id if isinstance(target, ast.Name) else None


def _is_looped_over(match: Match) -> bool:
    outer, name = match.source.statement(match.node), _assigned(match)
    if isinstance(outer, ast.For):
        return match.node in ast.walk(outer.iter)
    loops = find_all(match.source.function(outer), ast.For)
    return name is not None and any(loads(loop.iter, name) for loop in loops)


OPEN_SHAPE = _refusal(
    "open_shape",
    "TT102",
    """A call whose result's length depends on the data is left unchanged, with the reason.

    `nonzero`, `torch.where` with one argument, `unique` with its inverse or counts, and `one_hot` without a
    number of classes need a host-device sync to learn a size. If later code, or a draw of random numbers,
    depends on that size, no form of fixed size does the same.
    """,
    _open_shapes,
    _why_open_shape,
    (DISTINCT_COUNT, MASKED_COUNT, MASKED_FILL),
)


_LISTS = (
    "X[M.nonzero()]",
    "X[torch.nonzero(M)]",
    "X[M.nonzero().squeeze()]",
    "X[M.nonzero().squeeze(1)]",
)
_EXTREMES = name_set("max min amax amin aminmax")
_ORDERED = name_set("sort argsort topk kthvalue median nanmedian quantile mode unique")
_SPREADS = name_set("std var var_mean std_mean")
_LISTED = (
    "`x[mask]` would wait as well. Keep all rows and the mask, or bound it: "
    "`torch.nonzero_static(mask, size=n)`"
)


def _open_selections(source: SourceFile) -> Iterator[Place]:
    for node in source.at({(ast.Call, ""), (ast.Subscript, "")}):
        for form in _LISTS:
            if (bound := match_form(form, node, source)) is not None:
                yield node, bound.parts, form
                break
        else:
            if indices := _indices(node, source):
                yield node, dict(zip(("X", "M", "M1", "M2", "M3"), indices, strict=False)), ""


def _indices(node: ast.AST, source: SourceFile) -> list[ast.expr]:
    """Return the tensor that is selected from, and the parts of its index that may be masks."""
    if chosen := selection(node, source):
        return [chosen.tensor, chosen.mask]
    if not isinstance(node, ast.Subscript) or not isinstance(node.slice, ast.Tuple):
        return []
    if not isinstance(node.ctx, ast.Load):
        return []
    masks = [one for one in node.slice.elts if mask_of_index(one) is not None]
    return [node.value, *masks] if masks else []


def _why_open_selection(match: Match, facts: Facts) -> str:
    if match.form in _LISTS:
        return _LISTED
    if facts.holds(lambda v: not _has_mask(v, match)):
        return "it is not a selection by a mask: another part of the line waits"
    outer, kind = match.source.parents.get(match.node), ""
    if isinstance(outer, ast.Attribute):
        kind = outer.attr
    elif isinstance(outer, ast.Call) and match.node in outer.args:
        kind = (match.source.dotted(outer.func) or "").removeprefix("torch.")
    if kind in _EXTREMES:
        return (
            f"`{kind}` of an empty selection raises an error, which no form of fixed size does. If the mask "
            "always selects an element, fill with the lowest value: `x.masked_fill(~mask, -math.inf).max()`"
        )
    if kind in _ORDERED:
        return (
            f"`{kind}` orders the selected elements. Fill unselected ones with infinity, "
            "sort all, and index with `mask.sum()` on the device"
        )
    if kind in _SPREADS:
        return (
            "the spread is around the mean of the selection. Compute it with weights: "
            "`n = mask.sum()`, `m = (x * mask).sum() / n`, then `(((x - m) ** 2) * mask).sum() / "
            "(n - 1)`"
        )
    return (
        "the selection has as many rows as the mask has true elements, and later code works with them. Keep "
        "all rows and the mask: multiply by it, fill with `torch.where`, or pad to a size that the host "
        "knows (`torch.nonzero_static(mask, size=n)`); else select once and reuse the result"
    )


def _has_mask(values: Values, match: Match) -> bool:
    masks = [getattr(values, name) for name in match.parts if name.startswith("M")]
    return is_tensor(values.X) and any(
        is_tensor(mask) and mask.dtype in ("bool", "uint8") for mask in masks
    )


OPEN_SELECTION = _refusal(
    "open_selection",
    "TT102",
    """A selection whose length matters to later code is left unchanged, with the reason.

    `x[mask]`, like `x[mask.nonzero()]`, has as many rows as the mask has true elements. If later code sorts
    them, takes their maximum or median, passes them to a network or returns them, no form of fixed size does
    the same.
    """,
    _open_selections,
    _why_open_selection,
    (MASKED_ASSIGNMENT, MASKED_COUNT, MASKED_CROSS_ENTROPY, MASKED_REDUCTION, partition.FIX),
)


_READING = name_set("""
    any all item isnan isinf isfinite equal allclose is_nonzero max min sum norm tolist count_nonzero
    eq ne lt le gt ge
""")
_RAISES = (
    "it raises, so the host must know. Check every N steps, or write "
    "`torch._assert_async(condition)`, which fails later"
)
_LEAVES = "it decides whether the loop continues. Check every N steps, or mask finished elements"
_REPEATS = (
    "the number of iterations depends on the device. Iterate as often as the host knows, and mask "
    "finished elements"
)
_COUNTED = (
    "the host counts to a number on the device. Count to one that the host knows, such as a size"
)
_CALLS = (
    "what it controls has a side effect, so the host must know. Test first what the host knows, or "
    "read them once a step"
)


def _conditions(source: SourceFile) -> Iterator[Place]:
    """Yield conditions and ranges that may depend on the device and that no other fix matches."""
    values = {
        branch.test
        for branch in branches(source)
        if all(is_total(one, source) for one in branch.expressions)
    }
    for node in source.at({(ast.If, ""), (ast.While, ""), (ast.IfExp, "")}):
        assert isinstance(node, ast.If | ast.While | ast.IfExp)
        filled = isinstance(node, ast.If) and fill_of(node, source) is not None
        if node.test not in values and not filled and _may_read(node.test):
            yield node.test, {"C": node.test}, ""
    for node in source.each(ast.For):
        if function_of(node.iter) == "range":
            yield node.iter, {"C": node.iter}, ""


def _may_read(node: ast.AST) -> bool:
    return isinstance(node, ast.Name | ast.Compare | ast.UnaryOp) or any(
        method_of(part) in _READING or function_of(part) in ("bool", "float", "int")
        for part in ast.walk(node)
    )


def _why_condition(match: Match, facts: Facts) -> str:
    outer = match.source.parents[match.node]
    if isinstance(outer, ast.While):
        return _REPEATS
    if isinstance(outer, ast.For):
        return _COUNTED
    body = [*outer.body, *outer.orelse] if isinstance(outer, ast.If) else []
    kinds = {type(part) for statement in body for part in ast.walk(statement)}
    if ast.Raise in kinds:
        return _RAISES
    return _LEAVES if kinds & {ast.Break, ast.Continue} else _CALLS


CONTROL_DEPENDENCE = _refusal(
    "control_dependence",
    "TT101",
    """A condition that decides what the host does next cannot move to the device: refused, with an
    alternative.

    `if torch.isnan(loss): raise`, `while not done.all():`, `for i in range(n.item()):` and branches that call
    functions need the value now. The alternative depends on what the condition controls: check less often,
    keep a flag on the device and read it once, test first what the host knows, or let the device check.
    """,
    _conditions,
    _why_condition,
)


_SIZES = ("shape", "size", "len", "dim", "numel")
_PLAIN_BOUNDS = "its bounds are Python numbers: another part of the line waits"
_BOUND = (
    "it decides the size of the slice. Keep all rows and a mask, or read all bounds with one "
    "`.tolist()` before"
)


def _slices(source: SourceFile) -> Iterator[Place]:
    for node in source.each(ast.Subscript):
        if bounds := list(filter(_may_be_a_tensor, _bounds(node.slice))):
            parts = {"X": node.value} | {f"B{number}": one for number, one in enumerate(bounds)}
            yield node, parts, ""


def _bounds(index: ast.expr) -> Iterator[ast.expr]:
    for one in index.elts if isinstance(index, ast.Tuple) else [index]:
        if isinstance(one, ast.Slice):
            yield from (bound for bound in (one.lower, one.upper, one.step) if bound is not None)


def _may_be_a_tensor(bound: ast.expr) -> bool:
    inner = bound.operand if isinstance(bound, ast.UnaryOp) else bound
    names = set(map(called, ast.walk(inner)))
    return not isinstance(inner, ast.Constant) and not names.intersection(_SIZES)


def _why_bound(match: Match, facts: Facts) -> str:
    bounds = [name for name in match.parts if name.startswith("B")]
    plain = facts.holds(lambda v: not any(is_tensor(getattr(v, name)) for name in bounds))
    return _PLAIN_BOUNDS if plain else _BOUND


DEVICE_BOUND = _refusal(
    "device_bound",
    "TT101",
    """A slice whose bound is on the device is left unchanged, with the reason.

    `x[:n]` with a tensor `n` calls its `__index__`, so the host reads it: the host must know the size of the
    slice. Leaving out `.item()` makes no difference.
    """,
    _slices,
    _why_bound,
    (padding_mask.FIX,),
)


_COPIED = (
    "the copy may be read before it is done. Record an event after it and wait for that, or drop "
    "`non_blocking=True`"
)


def _copies(source: SourceFile) -> Iterator[Place]:
    for node in source.calls("to"):
        words = keywords_of(node)
        where = node.args[0] if node.args else words.get("device")
        if isinstance(where, ast.Call) and source.dotted(where.func) == "torch.device":
            where = next(iter(where.args), None)
        to_host = constant_of(where) == "cpu" and constant_of(words.get("non_blocking")) is True
        if to_host and isinstance(node.func, ast.Attribute):
            yield node, {"X": node.func.value}, ""


UNSYNCHRONIZED_COPY = _refusal(
    "unsynchronized_copy",
    "TT105",
    """`x.to("cpu", non_blocking=True)` is refused: the values may not have arrived when the host reads them.

    A non-blocking copy to the host returns a tensor whose values arrive later. Code that reads it before the
    device has written it gets old memory, without an error. It is safe only after waiting for an event;
    without one, the plain `.cpu()` is right, and waits.
    """,
    _copies,
    lambda match, facts: _COPIED,
)


FIXES = (CONTROL_DEPENDENCE, DEVICE_BOUND, OPEN_SELECTION, OPEN_SHAPE, UNSYNCHRONIZED_COPY)
