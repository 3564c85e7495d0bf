"""Functions of linear algebra that read whether they succeeded, by those that leave it on the device."""

from __future__ import annotations

from collections.abc import Mapping

from torchtrim.rewriter.fix import Fix, Match, Writing, of_forms
from torchtrim.rewriter.replace import replace
from torchtrim.source.facts import Facts, is_floating


def _unchecked(name: str, doc: str, forms: Mapping[str, str], risk: str) -> Fix:
    def write(match: Match, facts: Facts) -> Writing:
        facts.need(f"`{match.text('A')[:60]}` is a tensor of floats", lambda v: is_floating(v.A))
        return Writing(replace(match, forms[match.form]), risk=risk)

    find = of_forms(lambda: fix, *forms)
    fix = Fix(name=name, doc=doc, codes=("TT101",), equivalence="BITWISE", find=find, write=write)
    return fix


UNCHECKED_CHOLESKY = _unchecked(
    "unchecked_cholesky",
    """`torch.linalg.cholesky(a)` becomes `torch.linalg.cholesky_ex(a).L`.

    Both compute the same; the first reads whether the matrix was positive definite, and raises if not. The
    other leaves that on the device.

    Never applied without being asked for: of a matrix that is not positive definite it gives a factor that
    is none, and no error.
    """,
    {
        "torch.linalg.cholesky(A)": "torch.linalg.cholesky_ex(A).L",
        "torch.linalg.cholesky(A, upper=U)": "torch.linalg.cholesky_ex(A, upper=U).L",
    },
    risk="a matrix that is not positive definite is no longer an error",
)

UNCHECKED_INVERSE = _unchecked(
    "unchecked_inverse",
    """`torch.linalg.inv(a)` becomes `torch.linalg.inv_ex(a).inverse`, and `solve(a, b)`
    `solve_ex(a, b).result`.

    Both compute the same; the first reads whether it was singular, and raises if so. The other leaves that
    on the device.

    Never applied without being asked for: of a singular matrix it gives infinities or NaN, and no error.
    """,
    {
        "torch.linalg.inv(A)": "torch.linalg.inv_ex(A).inverse",
        "torch.inverse(A)": "torch.linalg.inv_ex(A).inverse",
        "torch.linalg.solve(A, B)": "torch.linalg.solve_ex(A, B).result",
    },
    risk="a singular matrix is no longer an error",
)

FIXES = (UNCHECKED_CHOLESKY, UNCHECKED_INVERSE)
