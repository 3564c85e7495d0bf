"""`[[False] * n + [True] * (size - n) for n in lengths]` becomes a comparison of positions with lengths.

To repeat a list as often as a tensor says, the host reads the tensor, twice for each row. All rows at
once are `torch.arange(size) >= lengths[:, None]`. A length above `size`, or below zero, would make the
original's rows longer, or an error, and no run can show that there is none: it is suggested, not applied.

Refused where the list is built in a loop of statements, piece by piece; the reason has the line to write.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

from torchtrim.records.seen import Seen
from torchtrim.rewriter.fix import Fix, Match, Writing
from torchtrim.rewriter.replace import replace
from torchtrim.source.facts import Facts, Refused, is_number, is_tensor
from torchtrim.source.forms import match_form, root
from torchtrim.source.source import Source

_ROWS = "torch.tensor([[A] * N + [B] * (S - N) for N in L], **REST)"
_ROW = "[A] * N + [B] * (S - N)"


def find(source: Source) -> Iterator[Match]:
    """The lists of two values, of which the host must know how many there are of each."""
    inside: set[int] = set()
    for node in source.at({root(_ROWS), root(_ROW)}):
        bound = match_form(_ROWS, node, source)
        if bound is not None and _is_plain(bound.keywords["REST"], source):
            inside |= {id(part) for part in ast.walk(node)}
            assert isinstance(node, ast.expr)
            parts = {name: bound.parts[name] for name in "ABSL"} | {"R": node}
            yield Match(fix=FIX, source=source, node=node, parts=parts, form=_ROWS)
        elif id(node) not in inside and (bound := match_form(_ROW, node, source)) is not None:
            yield Match(fix=FIX, source=source, node=node, parts=bound.parts, form=_ROW)


def _is_plain(words: list[ast.keyword], source: Source) -> bool:
    """Whether the keywords say no more than a device and truth values."""
    return all(
        word.arg == "device" or (word.arg == "dtype" and source.dotted(word.value) == "torch.bool")
        for word in words
    )


def write(match: Match, facts: Facts) -> Writing:
    """The comparison of all positions with all lengths."""
    if match.form == _ROW:
        raise Refused(
            "the host reads how often each value is repeated, for each row. All rows at once are "
            "`torch.arange(size, device=lengths.device) >= lengths[:, None]`"
        )
    kinds = [_constant(match.parts[name]) for name in "AB"]
    if kinds not in ([False, True], [True, False]):
        raise Refused(
            "the two values are not True and False; compare positions and `torch.where` them"
        )
    devices = {v.R.device for v in facts.executions if v.has("R")}
    facts.need(
        f"`{match.text('L')}` is a tensor of whole numbers with one dimension, where the result goes",
        lambda v: not v.has("L") or (_are_lengths(v.L) and v.L.device in devices),
    )
    facts.need(
        f"`{match.text('S')}` is a number of Python's", lambda v: not v.has("S") or is_number(v.S)
    )
    sign = "<" if kinds[0] else ">="
    return Writing(
        replace(match, f"torch.arange(S, device=L.device) {sign} L[:, None]", {"L": "lengths"}),
        risk=f"a length above `{match.text('S')[:40]}`, or below zero, would make the original's rows "
        "longer; of no lengths at all it gives another shape. Make it if that cannot be",
    )


def _constant(node: ast.expr) -> object:
    return node.value if isinstance(node, ast.Constant) else None


def _are_lengths(lengths: Seen) -> bool:
    whole = is_tensor(lengths) and lengths.dtype in ("int64", "int32", "int16", "uint8")
    return whole and len(lengths.shape) == 1


FIX: Fix = Fix(codes=("TT101",), equivalence="BITWISE", find=find, write=write)
