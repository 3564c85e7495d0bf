"""`torch.bincount(x, minlength=k)` becomes a count into k places, where all values are known to be below k.

`bincount` asks for the least and the largest value, and the host waits twice, even where `minlength`
is given. A count into k places does not, but a value of k or more, which would have made the result
longer, is an error there. That all values are below k no run can show: it is suggested, not applied.

Refused without `minlength`, where the length is the data's, and with weights: of no values at all
`bincount` then gives whole numbers, and no other form does.
"""

from __future__ import annotations

from torchtrim.rewriter.fix import Fix, Match, Writing, of_forms
from torchtrim.rewriter.replace import replace
from torchtrim.source.facts import Facts, Refused, is_integral

_KNOWN = ("torch.bincount(X, minlength=K)", "X.bincount(minlength=K)")
_WEIGHTED = (
    "torch.bincount(X, W, K)",
    "torch.bincount(X, W, **REST)",
    "torch.bincount(X, weights=W, **REST)",
    "X.bincount(W, **REST)",
    "X.bincount(weights=W, **REST)",
)
_UNKNOWN = ("torch.bincount(X)", "X.bincount()")
_COUNT = (
    "torch.zeros(K, dtype=torch.int64, device=X.device)"
    ".scatter_add_(0, X.long(), torch.ones_like(X, dtype=torch.int64))"
)


def write(match: Match, facts: Facts) -> Writing:
    """The count into a known number of places."""
    if match.form in _UNKNOWN:
        raise Refused(
            "how long the result is, the data decides. Where the number of values is known, write "
            "`torch.zeros(k, dtype=torch.int64, device=x.device).scatter_add_(0, x, torch.ones_like(x))`"
        )
    if match.form in _WEIGHTED:
        raise Refused(
            "of no values it gives whole numbers, else the weights' own type. Where the number k of values "
            "is known, write `torch.zeros(k, dtype=w.dtype, device=w.device).scatter_add_(0, x, w)`"
        )
    facts.need(
        f"`{match.text('X')}` is a tensor of whole numbers with one dimension",
        lambda v: is_integral(v.X) and v.X.dtype != "bool" and len(v.X.shape) == 1,
    )
    facts.need(f"`{match.text('K')}` is a whole number of Python's", lambda v: v.K.kind == "int")
    return Writing(
        replace(match, _COUNT, {"X": "values", "K": "places"}),
        risk=f"a value of `{match.text('K')[:40]}` or more would make the original's result longer, and is "
        "an error here. Make it if all values are below",
    )


FIX: Fix = Fix(
    codes=("TT101", "TT102"),
    equivalence="BITWISE",
    find=of_forms(lambda: FIX, *_KNOWN, *_UNKNOWN, *_WEIGHTED),
    write=write,
)
