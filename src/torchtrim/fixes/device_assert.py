"""`assert (a >= b).all(), "message"` becomes `torch._assert_async(...)`, which the device checks.

Never applied without being asked for: where it fails, the error comes later than the statement, when the
host waits next, and on CUDA it ends the process's use of the device, so it cannot be caught. What is
computed is the same as long as it holds. Python's `-O` removes the one and not the other.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

from torchtrim.rewriter.fix import Edit, Fix, Match, Writing
from torchtrim.rewriter.replace import atom, check_comments, torch_of
from torchtrim.source.facts import Facts, Refused
from torchtrim.source.reads import is_single, read_of
from torchtrim.source.source import Source

_RISK = "if it fails, the error comes later, and after it the process can use the device no more"
_ASKING = frozenset(["all", "any", "isfinite", "isnan", "isinf", "allclose", "equal", "item"])


def find(source: Source) -> Iterator[Match]:
    """Assertions on what may be a tensor."""
    for node in source.at({(ast.Assert, "")}):
        assert isinstance(node, ast.Assert)
        test = _condition(node, source)
        asked = ast.walk(node.test)
        asks = any(isinstance(one, ast.Attribute) and one.attr in _ASKING for one in asked)
        if asks and not isinstance(test, ast.BoolOp):
            yield Match(fix=FIX, source=source, node=node, parts={"C": test})


def _condition(node: ast.Assert, source: Source) -> ast.expr:
    """What is asked, without a `not` before it, and as the tensor where it is read."""
    test = node.test.operand if _is_turned(node) else node.test  # type: ignore[attr-defined]
    read = read_of(test, source)
    return read.tensor if read is not None and read.cast in ("", "bool") else test


def _is_turned(node: ast.Assert) -> bool:
    return isinstance(node.test, ast.UnaryOp) and isinstance(node.test.op, ast.Not)


def write(match: Match, facts: Facts) -> Writing:
    """The assertion on the device."""
    node, source = match.node, match.source
    assert isinstance(node, ast.Assert)
    facts.need(
        f"`{match.text('C')[:60]}` is a tensor of one truth value",
        lambda v: is_single(v.C) and v.C.dtype == "bool",
    )
    message = ""
    if node.msg is not None:
        if not isinstance(node.msg, ast.Constant) or not isinstance(node.msg.value, str):
            raise Refused(
                "its message is computed where it fails; the device takes only a text that is there before"
            )
        message = f", {source.segment(node.msg)}"
    torch, imports = torch_of(source)
    test = match.text("C")
    if _is_turned(node):
        test = f"{atom(source, match.parts['C'])}.logical_not()"
    text = f"{torch}._assert_async({test}{message})"
    edits = (Edit(source.start(node), source.end(node), text), *imports)
    check_comments(source, edits)
    return Writing(edits, risk=_RISK)


FIX = Fix(codes=("TT101",), equivalence="BITWISE", find=find, write=write)
