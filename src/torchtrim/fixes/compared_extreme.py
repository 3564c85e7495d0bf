"""Python's `max(a, b)` and `min(a, b)` of two tensors become `torch.where(b > a, b, a)`.

Python compares them and reads the answer. The device can choose itself, by the same comparison: what a NaN
gives stays as it was. Ranks and types that were seen are tested for; for others the original is kept.

Needs tensors of zero dimensions of one type and device, without gradients, of which what was not chosen gets
none. Refused where the result, or one of the two, may be written to afterwards: Python gives one of them, and
no copy.
"""

from __future__ import annotations

import ast

from torchtrim.rewriter.fix import Fix, Match, Writing, of_forms
from torchtrim.rewriter.guarded import for_kinds_seen
from torchtrim.rewriter.replace import replace
from torchtrim.source.facts import Facts, Refused, Values, is_tensor
from torchtrim.source.names import only_reads_at, stays
from torchtrim.source.uses import loads

_FORMS = {"max(A, B)": "torch.where(B > A, B, A)", "min(A, B)": "torch.where(B < A, B, A)"}


def write(match: Match, facts: Facts) -> Writing:
    """The choice on the device."""
    source, node = match.source, match.node
    assert isinstance(node, ast.Call)
    if not isinstance(node.func, ast.Name) or source.imported.get(node.func.id):
        raise Refused("it is not Python's own")
    if loads(source.function(node), node.func.id) and node.func.id in source.bound(
        source.function(node)
    ):
        raise Refused("it is not Python's own")
    facts.need("both are tensors of zero dimensions, of one type and device", _alike, told=_is_told)
    facts.need("no gradient flows to them", _without_grad)
    statement = source.statement(node)
    kept = all(stays(source, match.parts[part], statement) for part in "AB")
    if not kept or not only_reads_at(source, node):
        raise Refused("the result is one of the two, and may be written to. Use `torch.maximum`")
    return Writing(for_kinds_seen(match, facts, replace(match, _FORMS[match.form])))


def _alike(values: Values) -> bool:
    one, other = values.A, values.B
    alike = (one.dtype, one.device) == (other.dtype, other.device)
    return is_tensor(one, other) and one.shape == other.shape == () and alike


def _is_told(values: Values) -> bool:
    return is_tensor(values.A, values.B) and values.A.shape == values.B.shape == ()


def _without_grad(values: Values) -> bool:
    return not values.grad or not (values.A.requires_grad or values.B.requires_grad)


FIX: Fix = Fix(
    codes=("TT101",), equivalence="BITWISE", find=of_forms(lambda: FIX, *_FORMS), write=write
)
