"""`torch.linalg.inv(a)` becomes `torch.linalg.inv_ex(a).inverse`, and `solve(a, b)` `solve_ex(a, b).result`.

Both compute the same; the first reads whether it was singular, and raises if so. The other leaves that on
the device.

Never applied without being asked for: of a singular matrix it gives infinities or NaN, and no error.
"""

from __future__ import annotations

from torchtrim.rewriter.fix import Fix, Match, Writing, of_forms
from torchtrim.rewriter.replace import replace
from torchtrim.source.facts import Facts, is_floating

_INVERSE, _SOLVED = "torch.linalg.inv_ex(A).inverse", "torch.linalg.solve_ex(A, B).result"
_FORMS = {
    "torch.linalg.inv(A)": _INVERSE,
    "torch.inverse(A)": _INVERSE,
    "torch.linalg.solve(A, B)": _SOLVED,
}


def write(match: Match, facts: Facts) -> Writing:
    """The same without the check."""
    template = _FORMS[match.form]
    facts.need(f"`{match.text('A')[:60]}` is a tensor of floats", lambda v: is_floating(v.A))
    return Writing(replace(match, template), risk="a singular matrix is no longer an error")


FIX: Fix = Fix(
    codes=("TT101",), equivalence="BITWISE", find=of_forms(lambda: FIX, *_FORMS), write=write
)
