"""`torch.from_numpy(x.detach().cpu().numpy()).to(d)` becomes `x.detach().to(d, copy=True)`.

The values go to the host and back, and the host waits both times. A copy on the device has
the same values and type; in memory they may lie in another order, in which a sum rounds in another way.

Needs a tensor that wants no gradient where none is cut off, as NumPy's arrays do.
"""

from __future__ import annotations

from torchtrim.rewriter.fix import Fix, Match, Writing, of_forms
from torchtrim.rewriter.replace import replace
from torchtrim.source.facts import Facts, Values, is_tensor
from torchtrim.source.uploads import need_device

_ARRAYS = ("X.detach().cpu().numpy()", "X.cpu().detach().numpy()", "X.cpu().numpy()")
_CALLS = (
    "torch.from_numpy({}).to(D)",
    "torch.tensor({}, device=D)",
    "torch.tensor({}).to(D)",
    "torch.as_tensor({}, device=D)",
)
_FORMS = tuple(call.format(array) for call in _CALLS for array in _ARRAYS)


def write(match: Match, facts: Facts) -> Writing:
    """The copy on the device."""
    facts.need(f"`{match.text('X')[:60]}` is a tensor that NumPy can hold", _fits)
    need_device(facts, match.text("D"))
    return Writing(replace(match, "X.detach().to(D, copy=True)"))


def _fits(values: Values) -> bool:
    return is_tensor(values.X) and values.X.dtype != "bfloat16"


FIX: Fix = Fix(
    codes=("TT101", "TT103"),
    equivalence="ROUNDING",
    find=of_forms(lambda: FIX, *_FORMS),
    write=write,
)
