"""`x.new_tensor(0.5)` becomes `x.new_full((), 0.5)`, which the device makes itself.

`new_tensor` makes its tensor on the host and copies it, and the host waits. Both have the type and the
device of `x`, unless the call names another.

Needs a number of Python's that is written there, and no larger than 32 bits hold.
"""

from __future__ import annotations

import ast

from torchtrim.rewriter.fix import Fix, Match, Writing, of_forms
from torchtrim.rewriter.replace import replace
from torchtrim.source.facts import Facts, Refused, is_floating

_FORMS = {
    "X.new_tensor(C)": "X.new_full((), C)",
    "X.new_tensor(C, dtype=T)": "X.new_full((), C, dtype=T)",
    "X.new_tensor(C, requires_grad=G)": "X.new_full((), C, requires_grad=G)",
}
_MOST = 2.0**15


def write(match: Match, facts: Facts) -> Writing:
    """The number made on the device."""
    number = match.parts["C"]
    turned = isinstance(number, ast.UnaryOp) and isinstance(number.op, ast.USub)
    inner = number.operand if turned else number  # type: ignore[attr-defined]
    value = inner.value if isinstance(inner, ast.Constant) else None
    if type(value) not in (int, float) or not abs(value) < _MOST:  # type: ignore[arg-type]
        raise Refused("what it is made of is not a small number that is written there")
    facts.need(f"`{match.text('X')[:60]}` is a tensor of floats", lambda v: is_floating(v.X))
    return Writing(replace(match, _FORMS[match.form]))


FIX: Fix = Fix(
    codes=("TT103",), equivalence="BITWISE", find=of_forms(lambda: FIX, *_FORMS), write=write
)
