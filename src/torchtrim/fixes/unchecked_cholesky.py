"""`torch.linalg.cholesky(a)` becomes `torch.linalg.cholesky_ex(a).L`.

Both compute the same; the first reads whether the matrix was positive definite, and raises if not. The other
leaves that on the device.

Never applied without being asked for: of a matrix that is not positive definite it gives a factor that is
none, and no error.
"""

from __future__ import annotations

from torchtrim.rewriter.fix import Fix, Match, Writing, of_forms
from torchtrim.rewriter.replace import replace
from torchtrim.source.facts import Facts, is_floating

_FORMS = {
    "torch.linalg.cholesky(A)": "torch.linalg.cholesky_ex(A).L",
    "torch.linalg.cholesky(A, upper=U)": "torch.linalg.cholesky_ex(A, upper=U).L",
}


def write(match: Match, facts: Facts) -> Writing:
    """The same without the check."""
    facts.need(f"`{match.text('A')[:60]}` is a tensor of floats", lambda v: is_floating(v.A))
    risk = "a matrix that is not positive definite is no longer an error"
    return Writing(replace(match, _FORMS[match.form]), risk=risk)


FIX: Fix = Fix(
    codes=("TT101",), equivalence="BITWISE", find=of_forms(lambda: FIX, *_FORMS), write=write
)
