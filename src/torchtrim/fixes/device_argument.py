"""`x.clamp(max=t.item())`, `x.masked_fill(m, t.item())`, `x.mul(t.item())` take the tensor itself.

Each of these functions takes a tensor of zero dimensions for the number, and then nothing is read. The
tensor must be of the type of `x`, so that the result is too, and lie on its device: its type and dimensions
are tested, which needs no sync, and for others it is read. It is detached, as the number was. A device
divides by a number of the host as a multiplication by its reciprocal, so a quotient may differ in its last
bit.

Refused where the tensor may be written to afterwards, since backward would see it; and, from torch 2.14 on,
a bound where a gradient is wanted: at an element that equals it a tensor and a number have other gradients.
"""

from __future__ import annotations

from torchtrim.rewriter.fix import Fix, Match, Writing, of_forms
from torchtrim.rewriter.replace import replace
from torchtrim.source.facts import Facts, Refused, is_floating
from torchtrim.source.names import stays
from torchtrim.source.reads import bare
from torchtrim.syncs.lookup import is_from

_NAMED = ("clamp(X, max=N)", "clamp(X, min=N)", "clip(X, max=N)", "clip(X, min=N)")
_METHODS = (
    *(
        f"X.{name}({word}=N)"
        for name in ("clamp", "clip", "clamp_", "clip_")
        for word in ("min", "max")
    ),
    *(
        f"X.{name}(N)"
        for name in ("add", "sub", "mul", "div", "add_", "sub_", "mul_", "div_", "fill_")
    ),
    "X.masked_fill(M, N)",
    "X.masked_fill_(M, N)",
)
_FUNCTIONS = (
    *(f"torch.{name}" for name in _NAMED),
    *(f"torch.{name}(X, N)" for name in ("add", "sub", "mul", "div")),
    "torch.masked_fill(X, M, N)",
    "torch.where(M, X, N)",
    "torch.where(M, N, X)",
)
_TEMPLATES = (*_METHODS, *_FUNCTIONS)
_FORMS = [
    template.replace("N)", f"{read})").replace("N,", f"{read},")
    for template in _TEMPLATES
    for read in ("N.item()", "float(N)")
]


def write(match: Match, facts: Facts) -> Writing:
    """The same call, with the tensor."""
    source = match.source
    tensor = bare(match.parts["N"])
    facts.need(
        f"`{match.text('N')[:60]}` is a tensor of zero dimensions, of the type and device of "
        f"`{match.text('X')[:60]}`",
        lambda v: (
            is_floating(v.X)
            and is_floating(v.N)
            and not v.N.shape
            and (v.N.dtype, v.N.device) == (v.X.dtype, v.X.device)
        ),
    )
    if any(name in match.form for name in ("clamp", "clip")) and is_from("2.14"):
        facts.need(
            f"`{match.text('X')[:60]}` wants no gradient: at its bound it is another for a tensor",
            lambda v: not v.X.requires_grad,
        )
    if not stays(source, tensor, source.statement(match.node)):
        raise Refused(f"`{match.text('N')[:60]}` may be written to afterwards. Use `.clone()`")
    graded = any(hasattr(v, "N") and v.N.requires_grad for v in facts.executions)
    given = "N.detach()" if graded or not facts.seen else "N"
    read = "float(N)" if "float(N)" in match.form else "N.item()"
    floats = " and N.is_floating_point()" if read == "float(N)" else ""
    chosen = f"{given} if N.dtype == X.dtype{floats} and not N.dim() else {read}"
    template = match.form.replace(read, chosen)
    return Writing(replace(match, template, {"X": "values", "N": "number"}))


FIX: Fix = Fix(
    codes=("TT101",), equivalence="ROUNDING", find=of_forms(lambda: FIX, *_FORMS), write=write
)
