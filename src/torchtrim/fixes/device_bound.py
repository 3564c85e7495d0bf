"""A slice whose bound is on the device is left as it is, with the reason.

`x[:n]` with a tensor `n` calls its `__index__`, so the host reads it: the slice's size is a number that
the host must know. That it is written without `.item()` changes nothing.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

from torchtrim.fixes import padding_mask
from torchtrim.rewriter.fix import Fix, Match, Writing
from torchtrim.source.facts import Facts, Refused, is_tensor
from torchtrim.source.source import Source

_SIZES = ("shape", "size", "len", "dim", "numel")


def find(source: Source) -> Iterator[Match]:
    """The slices with a bound that may be a tensor."""
    fixed = {
        id(part)
        for match in padding_mask.FIX.places(source)
        for part in ast.walk(match.begin or match.node)
    }
    for node in source.each(ast.Subscript):
        if id(node) in fixed:
            continue
        bounds = [one for one in _bounds(node.slice) if _may_be_a_tensor(one)]
        if bounds:
            parts = {"X": node.value} | {f"B{number}": one for number, one in enumerate(bounds)}
            yield Match(fix=FIX, source=source, node=node, parts=parts)


def _bounds(index: ast.expr) -> Iterator[ast.expr]:
    for one in index.elts if isinstance(index, ast.Tuple) else [index]:
        if isinstance(one, ast.Slice):
            yield from (bound for bound in (one.lower, one.upper, one.step) if bound is not None)


def _may_be_a_tensor(bound: ast.expr) -> bool:
    inner = bound.operand if isinstance(bound, ast.UnaryOp) else bound
    names = {part.attr for part in ast.walk(inner) if isinstance(part, ast.Attribute)}
    names |= {part.id for part in ast.walk(inner) if isinstance(part, ast.Name)}
    return not isinstance(inner, ast.Constant) and not names.intersection(_SIZES)


def write(match: Match, facts: Facts) -> Writing:
    """Nothing: tells why."""
    names = [name for name in match.parts if name.startswith("B")]
    if facts.holds(lambda v: not any(is_tensor(getattr(v, name)) for name in names)):
        raise Refused(
            "its bounds are numbers of Python's: what waits in this line is something else"
        )
    raise Refused(
        "the host reads the bound, for it decides how large the slice is. Keep all rows and a mask, "
        "`torch.arange(len(x), device=x.device) < n`, or read the bounds of all slices at once with one "
        "`.tolist()` before"
    )


FIX: Fix = Fix(codes=("TT101",), equivalence="BITWISE", find=find, write=write)
