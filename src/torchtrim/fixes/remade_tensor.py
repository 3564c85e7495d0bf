"""`torch.tensor(loss.item(), device=d)` becomes `loss.detach().to(device=d, dtype=..., copy=True)`.

The number is read, which waits, and copied back, which waits again. A copy on the device does neither.

Needs a tensor of zero dimensions: of floats, whose copy has the default type or the one that is given, or of
64-bit integers. Ranks and types that were seen are tested for; for others the original is kept.
"""

from __future__ import annotations

from torchtrim.rewriter.fix import Fix, Match, Writing, of_forms
from torchtrim.rewriter.guarded import for_kinds_seen
from torchtrim.rewriter.replace import replace
from torchtrim.source.facts import Facts, Refused, Values, is_floating
from torchtrim.source.uploads import need_device

_READS = ("X.item()", "X.detach().item()", "float(X)", "X.cpu().item()")
_CALLS = {
    "torch.tensor({}, dtype=T, device=D)": "T",
    "torch.tensor({}, device=D, dtype=T)": "T",
    "torch.tensor({}, device=D)": "",
    "torch.tensor({}).to(D)": "",
    "torch.as_tensor({}, device=D)": "",
}
_TYPES = ("torch.float32", "torch.float", "torch.float64", "torch.double")
_FORMS = {call.format(read): dtype for call, dtype in _CALLS.items() for read in _READS}


def write(match: Match, facts: Facts) -> Writing:
    """The copy on the device."""
    facts.need(f"`{match.text('X')[:60]}` is a tensor of zero dimensions", _readable)
    need_device(facts, match.text("D"))
    whole = {not is_floating(v.X) for v in facts.executions if v.has("X")}
    if len(whole) > 1:
        raise Refused("it is of floats and of integers, in different runs")
    dtype = _FORMS[match.form]
    if whole == {True}:
        if "float(" in match.form or dtype:
            raise Refused("an integer would be made a float by way of another")
        dtype = "torch.int64"
    elif dtype and match.source.dotted(match.parts["T"]) not in _TYPES:
        raise Refused("the type that is asked for is not one of floats of 32 or 64 bits")
    dtype = dtype or "torch.get_default_dtype()"
    edits = replace(match, f"X.detach().to(device=D, dtype={dtype}, copy=True)")
    return Writing(for_kinds_seen(match, facts, edits))


def _readable(values: Values) -> bool:
    return not values.X.shape and (is_floating(values.X) or values.X.dtype == "int64")


FIX: Fix = Fix(
    codes=("TT101", "TT103"),
    equivalence="BITWISE",
    find=of_forms(lambda: FIX, *_FORMS),
    write=write,
)
