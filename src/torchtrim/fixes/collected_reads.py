"""`[v.item() for v in losses]` and `{k: v.item() for k, v in losses.items()}` become one read of all.

Each element is read on its own, and waits. Stacked they come in one copy. What is empty stays empty.

Needs tensors of zero dimensions, all of one type and device. Values that are read count as real numbers,
as in the run that was watched.
"""

from __future__ import annotations

from torchtrim.rewriter.fix import Fix, Match, Writing, of_forms
from torchtrim.rewriter.replace import replace
from torchtrim.source.facts import Facts, Refused, Values, is_floating, is_integral, is_tensor

_LIST = "torch.stack(tuple(X)).tolist() if X else []"
_CAST_LIST = "list(map(CAST, torch.stack(tuple(X)).tolist())) if X else []"
_DICT = "dict(zip(X, torch.stack(tuple(X.values())).tolist())) if X else {}"
_CAST_DICT = "dict(zip(X, map(CAST, torch.stack(tuple(X.values())).tolist()))) if X else {}"
_READS = (
    "V.item()",
    "V.detach().item()",
    "V.detach().cpu().item()",
    "V.cpu().item()",
    "float(V)",
    "int(V)",
)
_FORMS = {f"[{read} for V in X]": _LIST for read in _READS} | {
    f"{{K: {read} for K, V in X.items()}}": _DICT for read in _READS
}


def write(match: Match, facts: Facts) -> Writing:
    """All in one copy."""
    template = _FORMS[match.form]
    cast = next((one for one in ("float", "int") if f"{one}(V)" in match.form), "")
    kinds = ("list", "tuple") if template is _LIST else ("dict",)
    if cast:
        template = (_CAST_LIST if template is _LIST else _CAST_DICT).replace("CAST", cast)
    facts.need(
        f"`{match.text('X')[:60]}` is a {kinds[0]} of tensors of zero dimensions",
        lambda v: (not hasattr(v, "X") or v.X.kind in kinds) and _is_scalar(v),
    )
    seen = {(v.V.dtype, v.V.device) for v in facts.executions if hasattr(v, "V")}
    if len(seen) > 1:
        raise Refused("what it reads is of several types or devices")
    if not seen:
        facts.leave_open("they are tensors of zero dimensions")
    if "float(V)" in match.form:
        facts.need("they are of floats", lambda v: not hasattr(v, "V") or is_floating(v.V))
    if "int(V)" in match.form:
        facts.need("they are of integers", _is_whole)
    return Writing(replace(match, template, {"X": "read"}))


def _is_scalar(values: Values) -> bool:
    """Whether the element is one, in an execution that saw one: only the first of a list comes with it."""
    return not hasattr(values, "V") or (is_tensor(values.V) and not values.V.shape)


def _is_whole(values: Values) -> bool:
    return not hasattr(values, "V") or (is_integral(values.V) and values.V.dtype != "bool")


FIX: Fix = Fix(
    codes=("TT101",), equivalence="BITWISE", find=of_forms(lambda: FIX, *_FORMS), write=write
)
