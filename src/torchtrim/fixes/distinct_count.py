"""`torch.unique(x).numel()` and `(torch.unique(x) != c).sum()` count by sorting, at a fixed size.

The result of `unique` is as long as there are distinct values, so the host waits to learn how many.
Sorted, a value is distinct where it differs from the one before it; their count is a tensor of fixed
shape. It needs integers: of floating numbers, `inf - inf` would count as a difference.

The count is then a tensor on the device. It is written only where that is used as a tensor, with
tensors of float32 or float64: a 16-bit one would round it.
"""

from __future__ import annotations

from torchtrim.rewriter.fix import Fix, Match, Writing, of_forms
from torchtrim.rewriter.guarded import for_names_seen, with_names
from torchtrim.rewriter.replace import replace
from torchtrim.rewriter.tensor_uses import need_tensor_uses, need_wide_uses, with_companions
from torchtrim.source.facts import Facts, is_integral, is_number

_ALL = "(X.flatten().sort().values.diff() != 0).sum() + (X.numel() > 0)"
_BUT_ONE = f"{_ALL} - (X == C).any().long()"
_COUNTS = (
    "len(torch.unique(X))",
    "len(X.unique())",
    "torch.unique(X).numel()",
    "X.unique().numel()",
    "torch.unique(X).size(0)",
    "X.unique().size(0)",
    "torch.unique(X).shape[0]",
    "X.unique().shape[0]",
)
_OTHERS = ("(torch.unique(X) != C).sum()", "(X.unique() != C).sum()")


def write(match: Match, facts: Facts) -> Writing:
    """The count, by sorting."""
    facts.need(f"`{match.text('X')}` is a tensor of integers", lambda v: is_integral(v.X))
    if "C" in match.parts:
        facts.need(f"`{match.text('C')}` is a number of Python's", lambda v: is_number(v.C))
        return Writing(for_names_seen(match, facts, replace(match, _BUT_ONE, {"X": "values"})))
    need_tensor_uses(match, facts, "X")
    need_wide_uses(match, facts)
    return Writing(for_names_seen(match, facts, replace(match, _ALL, {"X": "values"})))


FIX: Fix = Fix(
    codes=("TT102",),
    equivalence="BITWISE",
    find=with_names(with_companions(of_forms(lambda: FIX, *_OTHERS, *_COUNTS))),
    write=write,
)
