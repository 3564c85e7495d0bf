"""`loss / n.item()` divides by the tensor itself; `max(n.item(), 1)` there becomes `n.clamp(min=1)`.

A number that is read only to be added to, multiplied with or divided into tensors of the same device need
not come to the host. The tensor takes its place, detached, where the result keeps its type: 16-bit tensors
only with a tensor of their own type, tensors of zero dimensions never with a wider one. A device divides by
a number of the host as a multiplication by its reciprocal, so a quotient may differ in its last bit.

Refused where the tensor may be written to after it was read. The types and ranks that were seen are tested
for, which needs no sync; for others it is read as before.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

from torchtrim.records.seen import Seen
from torchtrim.rewriter.fix import Fix, Match, Writing
from torchtrim.rewriter.guarded import for_names_seen, with_names
from torchtrim.rewriter.replace import replace
from torchtrim.rewriter.tensor_uses import need_tensor_uses, with_companions
from torchtrim.source.facts import Facts, Refused, is_floating, is_integral, is_number, is_tensor
from torchtrim.source.names import stays
from torchtrim.source.reads import read_of
from torchtrim.source.source import Source

_BOUNDS = {"max": "min", "min": "max"}
_NO_TENSORS = (ast.Constant, ast.List, ast.Tuple, ast.ListComp, ast.JoinedStr, ast.Dict)
_WIDE = ("float32", "float64")


def _find(source: Source) -> Iterator[Match]:
    for node in source.at({(ast.Call, "item"), (ast.Call, "float"), (ast.Call, "int")}):
        read = read_of(node, source)
        if read is None or read_of(source.parents[node], source) is not None:
            continue
        parts = {"N": read.tensor}
        whole: ast.AST = source.parents[node]
        if _is_bound(whole):
            assert isinstance(whole, ast.Call)
            parts["C"] = next(one for one in whole.args if one is not node)
            if source.start(parts["C"]) < source.start(node):
                parts["FIRST"] = parts["C"]
        else:
            whole = node
        match = Match(fix=FIX, source=source, node=whole, parts=parts, form=read.cast)
        if _only_arithmetic(match):
            yield match


def _is_bound(node: ast.AST) -> bool:
    named = isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
    return named and node.func.id in _BOUNDS and len(node.args) == 2 and not node.keywords  # type: ignore[attr-defined]


def _only_arithmetic(match: Match) -> bool:
    (found,) = with_companions(lambda _: iter([match]))(match.source)
    others = [node for name, node in found.parts.items() if name.startswith("WITH")]
    try:
        need_tensor_uses(match, Facts(), "N")
    except Refused:
        return False
    return bool(others) and not any(isinstance(one, _NO_TENSORS) for one in others)


def write(match: Match, facts: Facts) -> Writing:
    """The tensor in the place of its number."""
    source, tensor = match.source, match.parts["N"]
    facts.need(
        f"`{match.text('N')[:60]}` is a tensor of zero dimensions",
        lambda v: is_tensor(v.N) and not v.N.shape and (is_floating(v.N) or is_integral(v.N)),
    )
    if match.form == "int":
        facts.need(f"`{match.text('N')[:60]}` is of integers", lambda v: is_integral(v.N))
    if match.form == "bool":
        raise Refused("`bool` makes another number of it. Compare with `!= 0`")
    if not stays(source, tensor, source.statement(match.node)):
        raise Refused(f"`{match.text('N')[:60]}` may be written to afterwards. Use `.clone()`")
    bounded = "C" in match.parts
    need_tensor_uses(match, facts, "N")
    for name in [part for part in match.parts if part.startswith("WITH")]:
        facts.need(
            f"the type of `{match.text(name)[:60]}` stays what it is with a tensor as its partner",
            lambda v, name=name: _keeps(getattr(v, name), v.N, bounded=bounded),  # type: ignore[misc]
            told=lambda v, name=name: is_tensor(getattr(v, name)),  # type: ignore[misc]
        )
    graded = any(getattr(v, "N", None) and v.N.requires_grad for v in facts.executions)
    text = "N.detach()" if graded or not facts.seen else "N"
    edits = replace(match, _bounded(match, facts, text) if bounded else text)
    return Writing(for_names_seen(match, facts, edits))


def _bounded(match: Match, facts: Facts, text: str) -> str:
    """The bound, as `max` and `min` of Python's give it."""
    assert isinstance(match.node, ast.Call)
    assert isinstance(match.node.func, ast.Name)
    number = match.parts["C"]
    facts.need(f"`{match.text('C')[:60]}` is a number of Python's", lambda v: is_number(v.C))
    word = _BOUNDS[match.node.func.id]
    if facts.holds(lambda v: is_integral(v.N) and v.N.dtype != "bool"):
        value = number.value if isinstance(number, ast.Constant) else None
        if type(value) is float and value.is_integer():
            return f"{text}.clamp({word}={int(value)})"
        facts.need(f"`{match.text('C')[:60]}` is an integer", lambda v: v.C.kind == "int")
    elif "FIRST" in match.parts:
        raise Refused(
            "of a number and NaN, `max` and `min` give the number where it comes first, and `clamp` gives "
            "NaN. Write the tensor first if that does not matter"
        )
    else:
        facts.need(
            "the compared values have 32 or 64 bits",
            lambda v: v.N.dtype in _WIDE or v.N.dtype == "int64",
        )
    return f"{text}.clamp({word}=C)"


def _keeps(other: Seen, number: Seen, *, bounded: bool) -> bool:
    """Whether the partner's type and its rounding of the number are as with a number of Python's."""
    if is_integral(number):
        return other.dtype in _WIDE
    if bounded or other.dtype not in _WIDE:
        return other.dtype == number.dtype
    return other.dtype == number.dtype or bool(other.shape) or other.dtype == "float64"


def find(source: Source) -> Iterator[Match]:
    """Reads, and bounds of reads, that are used in arithmetic with tensors alone."""
    return with_names(with_companions(_find))(source)


FIX = Fix(codes=("TT101",), equivalence="ROUNDING", find=find, write=write)
