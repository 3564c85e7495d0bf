"""Scalars that the host reads for arithmetic or a comparison that the device can do."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from torchtrim.records.probes import ObservedValue
from torchtrim.rewriter.fix import Fix, Match, Writing, of_forms
from torchtrim.rewriter.reads import WIDE, need_tensor_uses, need_wide_uses, with_companions
from torchtrim.rewriter.replace import replace
from torchtrim.source.facts import (
    Facts,
    FixRefused,
    is_floating,
    is_integral,
    is_number,
    is_tensor,
    of_part,
    without_grad,
)
from torchtrim.source.names import is_unshared, only_reads_at
from torchtrim.source.nodes import constant_of, function_of
from torchtrim.source.source import SourceFile
from torchtrim.source.transfers import read_of

_BOUNDS = {"max": "min", "min": "max"}
_NO_TENSORS = (ast.Constant, ast.List, ast.Tuple, ast.ListComp, ast.JoinedStr, ast.Dict)


def _reads(source: SourceFile) -> Iterator[Match]:
    for node in source.calls("item", "float", "int"):
        read = read_of(node, source)
        if read is None or read_of(source.parents[node], source) is not None:
            continue
        parts = {"N": read.tensor}
        whole, outer = node, source.parents[node]
        if isinstance(outer, ast.Call) and _is_bound(outer):
            whole = outer
            parts["C"] = next(one for one in whole.args if one is not node)
            if source.start(parts["C"]) < source.start(node):
                parts["FIRST"] = parts["C"]
        match = Match(fix=ARITHMETIC_READ, source=source, node=whole, parts=parts, form=read.cast)
        if _only_arithmetic(match):
            yield match


def _is_bound(call: ast.Call) -> bool:
    return function_of(call) in _BOUNDS and len(call.args) == 2 and not call.keywords


def _only_arithmetic(match: Match) -> bool:
    (combined,) = with_companions(lambda _: iter([match]))(match.source)
    others = [node for name, node in combined.parts.items() if name.startswith("WITH")]
    try:
        need_tensor_uses(match, Facts(), "N")
    except FixRefused:
        return False
    return bool(others) and not any(isinstance(one, _NO_TENSORS) for one in others)


def _write_arithmetic_read(match: Match, facts: Facts) -> Writing:
    source, tensor = match.source, match.parts["N"]
    facts.need(
        f"`{match.text('N')[:60]}` is a tensor of zero dimensions",
        lambda v: is_tensor(v.N) and not v.N.shape and (is_floating(v.N) or is_integral(v.N)),
    )
    if match.form == "int":
        match.need(facts, "N", "is an integer tensor", is_integral)
    if match.form == "bool":
        raise FixRefused("`bool` changes its value. Compare with `!= 0`")
    if not is_unshared(source, tensor, source.statement(match.node)):
        raise FixRefused(f"`{match.text('N')[:60]}` may be written to afterwards. Use `.clone()`")
    bounded = "C" in match.parts
    need_tensor_uses(match, facts, "N")
    for name in [part for part in match.parts if part.startswith("WITH")]:
        facts.need(
            f"`{match.text(name)[:60]}` keeps its type when combined with a tensor",
            lambda v, name=name: _keeps(getattr(v, name), v.N, bounded=bounded),  # type: ignore[misc]
            static=of_part(name, is_tensor),
        )
    graded = any(getattr(v, "N", None) and v.N.requires_grad for v in facts.executions)
    text = "N.detach()" if graded or not facts.seen else "N"
    return Writing(replace(match, _bounded(match, facts, text) if bounded else text))


def _bounded(match: Match, facts: Facts, text: str) -> str:
    match.need(facts, "C", "is a Python number", is_number)
    word = _BOUNDS[function_of(match.node)]
    if facts.holds(lambda v: is_integral(v.N) and v.N.dtype != "bool"):
        value = constant_of(match.parts["C"])
        if isinstance(value, float) and value.is_integer():
            return f"{text}.clamp({word}={int(value)})"
        match.need(facts, "C", "is an integer", lambda seen: seen.kind == "int")
    elif "FIRST" in match.parts:
        raise FixRefused(
            "for NaN, `max` and `min` return the number if it comes first, and `clamp` returns NaN. "
            "Write the tensor first if that does not matter"
        )
    else:
        wide = (*WIDE, "int64")
        facts.need("the compared values have 32 or 64 bits", lambda v: v.N.dtype in wide)
    return f"{text}.clamp({word}=C)"


def _keeps(other: ObservedValue, number: ObservedValue, *, bounded: bool) -> bool:
    """Return True if the other operand keeps its type and rounds the number as it would a Python number."""
    if is_integral(number):
        return other.dtype in WIDE
    if bounded or other.dtype not in WIDE:
        return other.dtype == number.dtype
    return other.dtype == number.dtype or bool(other.shape) or other.dtype == "float64"


ARITHMETIC_READ: Fix = Fix(
    name="arithmetic_read",
    doc="""`loss / n.item()` divides by the tensor itself; `max(n.item(), 1)` there becomes `n.clamp(min=1)`.

    A number that is only added to tensors of the same device, multiplied with them or divided into them does
    not need to come to the host. The detached tensor replaces it where the result keeps its type: 16-bit
    tensors only with a tensor of their own type, tensors of zero dimensions never with a wider one. A device
    divides by a Python number as a multiplication by its reciprocal, so a quotient may differ in its last
    bit.

    Refused if the tensor may be written to after it was read.
    """,
    codes=("TT101",),
    equivalence="ROUNDING",
    find=with_companions(_reads),
    write=_write_arithmetic_read,
)


_FORMS = {"max(A, B)": "torch.where(B > A, B, A)", "min(A, B)": "torch.where(B < A, B, A)"}


def _write_compared_extreme(match: Match, facts: Facts) -> Writing:
    source, node = match.source, match.node
    name = function_of(node)
    if name in source.imported or name in source.bound(source.function(node)):
        raise FixRefused("it is not the Python builtin")
    if number := next((part for part in "AB" if _is_int(match.parts[part])), ""):
        return _clamped(match, facts, number)
    facts.need(
        "both are tensors of zero dimensions, with one type and device",
        lambda v: (
            is_tensor(v.A, v.B)
            and v.A.shape == v.B.shape == ()
            and (v.A.dtype, v.A.device) == (v.B.dtype, v.B.device)
        ),
        static=lambda v: is_tensor(v.A, v.B) and v.A.shape == v.B.shape == (),
    )
    facts.need("no gradient flows to them", lambda v: without_grad(v, v.A, v.B))
    statement = source.statement(node)
    unshared = all(is_unshared(source, match.parts[part], statement) for part in "AB")
    if not unshared or not only_reads_at(source, node):
        raise FixRefused(
            "the result is one of the two tensors, and may be written to. Use `torch.maximum`"
        )
    return Writing(replace(match, _FORMS[match.form]))


def _is_int(node: ast.expr) -> bool:
    return type(constant_of(node)) is int


def _clamped(match: Match, facts: Facts, number: str) -> Writing:
    """Bound a count by a literal number, where the count is only computed with."""
    tensor = "AB".replace(number, "")
    match.need(
        facts,
        tensor,
        "is an integer tensor of zero dimensions",
        lambda seen: is_integral(seen) and seen.dtype != "bool" and not seen.shape,
    )
    need_tensor_uses(match, facts, tensor)
    need_wide_uses(match, facts)
    word = _BOUNDS[function_of(match.node)]
    return Writing(replace(match, f"{tensor}.clamp({word}={number})"), equivalence="ROUNDING")


COMPARED_EXTREME: Fix = Fix(
    name="compared_extreme",
    doc="""Python's `max(a, b)` and `min(a, b)` of two tensors become `torch.where(b > a, b, a)`.

    Python compares them and reads the answer. The device can choose by the same comparison, with the same
    result for NaN.

    `max(n, 1)` of a count and a literal number becomes `n.clamp(min=1)`, if it is only computed with.

    Needs tensors of zero dimensions, of one type and device, without gradients: the tensor that is not chosen
    gets no gradient. Refused if the result, or either tensor, may be written to afterwards: Python returns
    one of them, not a copy.
    """,
    codes=("TT101",),
    equivalence="BITWISE",
    find=with_companions(of_forms(lambda: COMPARED_EXTREME, *_FORMS)),
    write=_write_compared_extreme,
)


FIXES = (ARITHMETIC_READ, COMPARED_EXTREME)
