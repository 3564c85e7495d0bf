"""A selection whose length goes on into what follows is left as it is, with the reason.

`x[mask]`, and `x[mask.nonzero()]` no less, has as many rows as the mask has true elements. Where what
follows sorts them, takes their maximum or median, gives them to a network or returns them, there is no
form of fixed size that does the same here.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

from torchtrim.fixes import (
    masked_assignment,
    masked_count,
    masked_cross_entropy,
    masked_reduction,
    partition,
)
from torchtrim.rewriter.fix import Fix, Match, Writing
from torchtrim.source.facts import Facts, Refused, Values, is_tensor
from torchtrim.source.forms import match_form
from torchtrim.source.selections import mask_of_index, selection
from torchtrim.source.source import Source

_OTHERS = (masked_assignment, masked_count, masked_cross_entropy, masked_reduction, partition)
_LISTS = (
    "X[M.nonzero()]",
    "X[torch.nonzero(M)]",
    "X[M.nonzero().squeeze()]",
    "X[M.nonzero().squeeze(1)]",
)
_EXTREMES = ("max", "min", "amax", "amin", "aminmax")
_ORDERED = (
    "sort",
    "argsort",
    "topk",
    "kthvalue",
    "median",
    "nanmedian",
    "quantile",
    "mode",
    "unique",
)
_SPREADS = ("std", "var", "var_mean", "std_mean")


def find(source: Source) -> Iterator[Match]:
    """The selections that no fix is for."""
    fixed = {
        id(part)
        for other in _OTHERS
        for match in other.FIX.places(source)
        for node in (match.node, match.begin or match.node)
        for part in ast.walk(node)
    }
    for node in source.at({(ast.Call, ""), (ast.Subscript, "")}):
        assert isinstance(node, ast.expr)
        if id(node) in fixed:
            continue
        for form in _LISTS:
            if (bound := match_form(form, node, source)) is not None:
                yield Match(fix=FIX, source=source, node=node, parts=bound.parts, form=form)
                break
        else:
            if indices := _indices(node, source):
                parts = dict(zip(("X", "M", "M1", "M2", "M3"), indices, strict=False))
                yield Match(fix=FIX, source=source, node=node, parts=parts)


def _indices(node: ast.expr, source: Source) -> list[ast.expr]:
    """The tensor that is selected from, and what may be a mask in its index."""
    found = selection(node, source)
    if found is not None:
        return [found.tensor, found.mask]
    if not isinstance(node, ast.Subscript) or not isinstance(node.slice, ast.Tuple):
        return []
    if not isinstance(node.ctx, ast.Load):
        return []
    masks = [one for one in node.slice.elts if mask_of_index(one) is not None]
    return [node.value, *masks] if masks else []


def write(match: Match, facts: Facts) -> Writing:
    """Nothing: tells why."""
    masks = [name for name in match.parts if name.startswith("M")]
    if match.form not in _LISTS and facts.holds(lambda v: not _has_mask(v, masks)):
        raise Refused("it is no selection by a mask: what waits in this line is something else")
    if match.form in _LISTS:
        raise Refused(
            "`x[mask]` would wait as well: the indices of a mask are as many as it has true elements, "
            "however they are asked for. Keep all rows and the mask, or `torch.nonzero_static(mask, size=n)` "
            "where a bound n is known"
        )
    raise Refused(_reason(match))


def _has_mask(values: Values, names: list[str]) -> bool:
    found = [getattr(values, name) for name in names]
    return is_tensor(values.X) and any(
        is_tensor(one) and one.dtype in ("bool", "uint8") for one in found
    )


def _reason(match: Match) -> str:
    kind = _what_follows(match)
    if kind in _EXTREMES:
        return (
            f"of nothing `{kind}` raises an error, which no fixed size does. Where something is always "
            "selected, fill with the least value: `x.masked_fill(~mask, -math.inf).max()`"
        )
    if kind in _ORDERED:
        return (
            f"`{kind}` ranks selected elements among themselves. Fill what is not selected with infinity, "
            "sort all, and take the places by `mask.sum()` as an index on the device"
        )
    if kind in _SPREADS:
        return (
            "the spread is around the mean of the selection. Compute it with weights: "
            "`n = mask.sum()`, `m = (x * mask).sum() / n`, then `(((x - m) ** 2) * mask).sum() / "
            "(n - 1)`"
        )
    return (
        "as many rows go on from here as the mask has true elements, and what follows works with them. Keep "
        "all rows and the mask: multiply by it, fill with `torch.where`, or pad to a size that the host "
        "knows (`torch.nonzero_static(mask, size=n)`); else select once and use that again"
    )


def _what_follows(match: Match) -> str:
    """The method or function that takes the selection."""
    outer = match.source.parents.get(match.node)
    if isinstance(outer, ast.Attribute):
        return outer.attr
    if isinstance(outer, ast.Call) and match.node in outer.args:
        return (match.source.dotted(outer.func) or "").removeprefix("torch.")
    return ""


FIX: Fix = Fix(codes=("TT102",), equivalence="BITWISE", find=find, write=write)
