"""A call whose result is as long as the data decides is left as it is, with the reason.

`nonzero`, `torch.where` with one argument, `unique` with its inverse or counts, and `one_hot` without a
number of classes need a host-device sync to learn a size. Where that size goes on into what follows, or into
a draw of random numbers, there is no form of fixed size that does the same.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from itertools import islice

from torchtrim.fixes import distinct_count, masked_count, masked_fill
from torchtrim.rewriter.fix import Fix, Match, Writing
from torchtrim.source.facts import Facts, Refused
from torchtrim.source.forms import match_form, root
from torchtrim.source.selections import selection
from torchtrim.source.source import Source
from torchtrim.source.uses import loads

_OTHERS = (distinct_count, masked_count, masked_fill)
_NONZERO = "nonzero"
_UNIQUE = "unique"
_CLASSES = "one_hot"
_FORMS = {
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
_REASONS = {
    _NONZERO: (
        "as many indices come from it as there are true elements, and what follows works with them. Where "
        "the host knows a bound, `torch.nonzero_static(mask, size=n)`; where they come from what the host "
        "made, make the indices there with `torch.arange`; else keep the mask and compute with all elements"
    ),
    _UNIQUE: (
        "as many values come from it as there are different ones, and what follows works with them. Where "
        "the range is known (classes, batch numbers), compute for all of it: `torch.arange(k)`, "
        "`scatter_add_` into k places, or `one_hot(x, k)`"
    ),
    _CLASSES: (
        "the host asks for the largest value to know how many classes there are. Say it: "
        "`one_hot(x, num_classes=k)`; from one run the number cannot be known"
    ),
}


def find(source: Source) -> Iterator[Match]:
    """The calls that no fix is for."""
    fixed = {
        id(part)
        for other in _OTHERS
        for match in other.FIX.places(source)
        for part in ast.walk(match.node)
    }
    for node in source.at(map(root, _FORMS)):
        if id(node) in fixed:
            continue
        if any(selection(outer, source) for outer in islice(source.around(node), 2)):
            continue
        for form in _FORMS:
            if (bound := match_form(form, node, source)) is not None:
                parts = bound.parts
                yield Match(fix=FIX, source=source, node=node, parts=parts, form=form)
                break


def write(match: Match, facts: Facts) -> Writing:
    """Nothing: tells why."""
    kind = _FORMS[match.form]
    if kind == _NONZERO and _sizes_a_draw(match):
        raise Refused(
            "as many random numbers are drawn as it has elements: any form of fixed size draws others. If "
            "that may be, `torch.rand(mask.shape).masked_fill(~mask, -1).topk(k).indices` draws k of them"
        )
    if kind == _UNIQUE and _is_looped_over(match):
        raise Refused(
            "the loop runs once for each value that occurs. Compute all values at once: sort by them, or "
            "`scatter_add_` by them; or loop over the range, if the host knows it"
        )
    raise Refused(_REASONS[kind])


def _sizes_a_draw(match: Match) -> bool:
    """Whether the length of what it gives is that of a permutation or of random numbers."""
    source = match.source
    statement = source.statement(match.node)
    if not isinstance(statement, ast.Assign) or not isinstance(statement.targets[0], ast.Name):
        return False
    names = {statement.targets[0].id}
    function = source.function(statement)
    for node in ast.walk(function):
        if isinstance(node, ast.Call) and (source.dotted(node.func) or "").startswith("torch.rand"):
            given = {use.id for part in node.args for name in names for use in loads(part, name)}
            if given:
                return True
    return False


def _is_looped_over(match: Match) -> bool:
    outer = match.source.statement(match.node)
    if isinstance(outer, ast.For):
        return any(part is match.node for part in ast.walk(outer.iter))
    if not isinstance(outer, ast.Assign) or not isinstance(outer.targets[0], ast.Name):
        return False
    name = outer.targets[0].id
    loops = (one for one in ast.walk(match.source.function(outer)) if isinstance(one, ast.For))
    return any(list(loads(loop.iter, name)) for loop in loops)


FIX: Fix = Fix(codes=("TT102",), equivalence="BITWISE", find=find, write=write)
