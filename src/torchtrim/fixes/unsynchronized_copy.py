"""`x.to("cpu", non_blocking=True)` is refused: what is read on the host may not have arrived yet.

A copy to the host that does not wait gives a tensor whose numbers come later. Whoever reads it before the
device has written it gets what was there before, without an error. It is safe only with an event that is
waited for first; without one, the plain `.cpu()` is right, and waits.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

from torchtrim.rewriter.fix import Fix, Match, Writing
from torchtrim.source.facts import Facts, Refused
from torchtrim.source.source import Source

_REASON = (
    "the copy is read without a sync before, so the numbers may be old ones. Record an event after it "
    "(`e = torch.cuda.Event(); e.record()`) and call `e.synchronize()` before the first read, or drop "
    "`non_blocking=True`"
)


def find(source: Source) -> Iterator[Match]:
    """Copies to the host that do not wait."""
    for node in source.at({(ast.Call, "to")}):
        assert isinstance(node, ast.Call)
        words = {word.arg: word.value for word in node.keywords}
        blocking = words.get("non_blocking", ast.Constant(False))
        where = node.args[0] if node.args else words.get("device")
        if (
            isinstance(blocking, ast.Constant)
            and blocking.value is True
            and _is_host(where, source)
        ):
            yield Match(fix=FIX, source=source, node=node, parts={"X": node.func.value})  # type: ignore[attr-defined]


def _is_host(node: ast.expr | None, source: Source) -> bool:
    if isinstance(node, ast.Call) and source.dotted(node.func) == "torch.device" and node.args:
        node = node.args[0]
    return isinstance(node, ast.Constant) and node.value == "cpu"


def write(match: Match, facts: Facts) -> Writing:
    """Raises `Refused`, always."""
    raise Refused(_REASON)


FIX = Fix(codes=("TT105",), equivalence="BITWISE", find=find, write=write)
