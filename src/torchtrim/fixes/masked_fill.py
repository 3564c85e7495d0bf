"""`x[mask.nonzero(as_tuple=True)] = 0` becomes `x[mask] = 0`, which fills in place without counting.

The indices of `nonzero` are as many as the mask has true elements, so the host waits to learn how many.
An assignment of a Python number by one boolean mask is dispatched to `masked_fill_`, which does not
count. The same memory is written, so views and other names of the tensor see it as before.

Refused where the mask has another shape than the tensor begins with, since indices reach further than
a mask does, and where the value is a tensor.
"""

from __future__ import annotations

import ast

from torchtrim.fixes.base import Fix, Match, Writing, of_forms
from torchtrim.fixes.reading.facts import Facts, is_integral, is_number, is_tensor
from torchtrim.fixes.writing.replace import replace

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
    if isinstance(match.parts["M"], ast.Compare):
        return Writing(replace(match, "X[M] = C"))
    facts.need(f"`{match.text('M')}` is of integers or truth values", lambda v: is_integral(v.M))
    return Writing(replace(match, "X[M != 0] = C"))


FIX: Fix = Fix(
    codes=("TT102", "TT103"),
    equivalence="BITWISE",
    find=of_forms(lambda: FIX, *FORMS),
    write=write,
)
