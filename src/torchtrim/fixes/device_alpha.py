"""`g.sub(w, alpha=p)` with a tensor `p` of the device becomes `g - w * p`.

`alpha` is a number of the host, so a tensor that is given for it is read, without a word. As a product it
stays on the device. The product is rounded once more than the fused form.

Refused where the product would be of another type than `w`, and where `p` may be written to afterwards.
"""

from __future__ import annotations

import re

from torchtrim.rewriter.fix import Fix, Match, Writing, of_forms
from torchtrim.rewriter.guarded import for_names_seen, with_names
from torchtrim.rewriter.replace import replace
from torchtrim.source.facts import Facts, Refused, Values, is_floating, is_tensor
from torchtrim.source.names import stays
from torchtrim.source.reads import bare

_TEMPLATES = {
    "X.sub(Y, alpha=P)": "X - Y * P",
    "X.add(Y, alpha=P)": "X + Y * P",
    "torch.sub(X, Y, alpha=P)": "X - Y * P",
    "torch.add(X, Y, alpha=P)": "X + Y * P",
    "X.sub_(Y, alpha=P)": "X.sub_(Y * P)",
    "X.add_(Y, alpha=P)": "X.add_(Y * P)",
}
_FORMS = {
    form.replace("alpha=P", f"alpha={read}"): template
    for form, template in _TEMPLATES.items()
    for read in ("P.item()", "float(P)", "P")
}


def write(match: Match, facts: Facts) -> Writing:
    """The sum or difference with a product."""
    facts.need(
        f"`{match.text('P')[:60]}` is a tensor of zero dimensions",
        lambda v: is_tensor(v.P) and is_floating(v.P) and not v.P.shape,
    )
    facts.need("the product is of the type of both tensors, on their device", _fits)
    tensor = bare(match.parts["P"])
    if not stays(match.source, tensor, match.source.statement(match.node)):
        raise Refused(f"`{match.text('P')[:60]}` may be written to afterwards. Use `.clone()`")
    template = _FORMS[match.form]
    if any(hasattr(v, "P") and v.P.requires_grad for v in facts.executions) or not facts.seen:
        template = re.sub(r"\bP\b", "P.detach()", template)
    return Writing(for_names_seen(match, facts, replace(match, template)))


def _fits(values: Values) -> bool:
    first, second, number = values.X, values.Y, values.P
    wide = second.dtype in ("float32", "float64") and bool(second.shape)
    return (
        is_floating(first)
        and first.dtype == second.dtype
        and first.device == second.device == number.device
        and (number.dtype == second.dtype or wide)
    )


FIX: Fix = Fix(
    codes=("TT101",),
    equivalence="ROUNDING",
    find=with_names(of_forms(lambda: FIX, *_FORMS)),
    write=write,
)
