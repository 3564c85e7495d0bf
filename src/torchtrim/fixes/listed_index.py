"""`x[:, [1, 0]]` becomes `torch.stack((x[:, 1], x[:, 0]), 1)`.

A list of places is made a tensor and copied to the device, and the host waits for that. Single places are
views, which cost nothing; they are put together on the device.

Its values are the same; in memory they may lie in another order, in which a sum rounds in another way.

Never applied without being asked for: of a tensor without elements a place out of bounds is an error then.
Refused for more than eight places, and where one comes twice, since gradients would be added up in another
order.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

from torchtrim.fixes.base import Fix, Match, Writing
from torchtrim.fixes.reading.facts import Facts, Refused, is_tensor
from torchtrim.fixes.reading.source import Source
from torchtrim.fixes.writing.replace import replace

_MOST = 8
_RISK = "of a tensor without elements a place out of bounds is an error"


def find(source: Source) -> Iterator[Match]:
    """What is read at a list of places that are written there, behind whole dimensions."""
    for node in source.nodes:
        if not isinstance(node, ast.Subscript) or not isinstance(node.ctx, ast.Load):
            continue
        parts = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
        if _numbers(parts[-1]) and all(map(_is_whole, parts[:-1])):
            yield Match(fix=FIX, source=source, node=node, parts={"X": node.value})


def _numbers(node: ast.expr) -> list[int]:
    """The places of a list of nothing but integers."""
    if not isinstance(node, ast.List):
        return []
    try:
        found = [ast.literal_eval(one) for one in node.elts]
    except ValueError:
        return []
    return found if all(type(one) is int for one in found) else []


def _is_whole(node: ast.expr) -> bool:
    if isinstance(node, ast.Slice):
        return node.lower is node.upper is node.step is None
    return isinstance(node, ast.Constant) and node.value is ...


def write(match: Match, facts: Facts) -> Writing:
    """The places one by one."""
    node = match.node
    assert isinstance(node, ast.Subscript)
    facts.need(f"`{match.text('X')[:60]}` is a tensor", lambda v: is_tensor(v.X))
    parts = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
    before, numbers = parts[:-1], _numbers(parts[-1])
    if len(numbers) > _MOST or len(set(numbers)) < len(numbers):
        raise Refused(
            f"a place comes twice, or there are more than {_MOST}. Keep the list on the device, as a buffer"
        )
    if min(numbers) < 0 <= max(numbers):
        raise Refused("places are counted from both ends, and may be the same")
    head = "".join("..., " if isinstance(one, ast.Constant) else ":, " for one in before)
    rows = ", ".join(f"X[{head}{number}]" for number in numbers) + (
        "," if len(numbers) == 1 else ""
    )
    dimension = -1 if "..." in head else len(before)
    along = f", {dimension}" if dimension else ""
    return Writing(replace(match, f"torch.stack(({rows}){along})"), risk=_RISK)


FIX: Fix = Fix(codes=("TT103",), equivalence="ROUNDING", find=find, write=write)
