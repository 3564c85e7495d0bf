"""`x[mask.nonzero(as_tuple=True)] = 0` becomes `x[mask] = 0`, which fills in place without counting.

The indices of `nonzero` are as many as the mask has true elements, so the host waits to learn how many.
An assignment of a Python number by one boolean mask is dispatched to `masked_fill_`, which does not
count. The same memory is written, so views and other names of the tensor see it as before.

Indices reach further than a mask does: they may be of fewer rows than the tensor has. So the shapes are
tested, which needs no sync, and for others the original assignment is kept. Refused where they do not fit
in the run, and where the value is a tensor.
"""

from __future__ import annotations

import ast

from torchtrim.rewriter.fix import Edit, Fix, Match, Writing, of_forms
from torchtrim.rewriter.replace import replace, replace_if
from torchtrim.source.facts import Facts, is_integral, is_number, is_tensor
from torchtrim.source.forms import equal

FORMS = (
    "X[M.nonzero(as_tuple=True)] = C",
    "X[torch.nonzero(M, as_tuple=True)] = C",
    "X[torch.where(M)] = C",
)


def write(match: Match, facts: Facts) -> Writing:
    """The same assignment by the mask itself."""
    facts.need(
        f"`{match.text('M')}` is a tensor of the shape that `{match.text('X')}` begins with",
        lambda v: (
            is_tensor(v.M, v.X)
            and len(v.M.shape) > 0
            and v.X.shape[: len(v.M.shape)] == v.M.shape
            and v.M.device == v.X.device
        ),
    )
    facts.need(f"`{match.text('C')}` is a number of Python's", lambda v: is_number(v.C))
    if not isinstance(match.parts["M"], ast.Compare):
        facts.need(
            f"`{match.text('M')}` is of integers or truth values", lambda v: is_integral(v.M)
        )
        return Writing(_where_it_fits(match, facts, "X[M != 0] = C"))
    if equal(match.parts["M"].left, match.parts["X"]) and _of_constants(match.parts["M"]):
        return Writing(replace(match, "X[M] = C"))
    return Writing(_where_it_fits(match, facts, "X[M] = C"))


def _of_constants(test: ast.Compare) -> bool:
    return all(isinstance(one, ast.Constant) for one in test.comparators)


def _where_it_fits(match: Match, facts: Facts, text: str) -> tuple[Edit, ...]:
    """The assignment for a mask of the shape that the tensor begins with, and else the original; without
    evidence, when it is suggested only, the assignment alone."""
    if not facts.seen:
        return replace(match, text)
    test = "M.dim() and M.shape == X.shape[: M.dim()]"
    return replace_if(match, test, text, names={"X": "target", "M": "mask"}, apart="C")


FIX: Fix = Fix(
    codes=("TT102", "TT103"),
    equivalence="BITWISE",
    find=of_forms(lambda: FIX, *FORMS),
    write=write,
)
