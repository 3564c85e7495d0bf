"""`torch.repeat_interleave(x, counts)` gets `output_size`, where the host has the counts.

The result is as long as the counts add up to, and the device has them, so the host waits. Where `counts`
was made of a list in the same function, `torch.tensor(numbers)`, the sum of the list is that length. A list
of one number may stand for all rows: then the device is asked, as before.

Refused where the host is not seen to know it: a size that is wrong is not noticed, and memory beyond the
result is read or written. The line to write is in the reason.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

from torchtrim.rewriter.fix import Edit, Fix, Match, Writing
from torchtrim.rewriter.replace import check_comments
from torchtrim.source.facts import Facts, Refused, is_tensor
from torchtrim.source.forms import match_form
from torchtrim.source.names import is_private, only_reads
from torchtrim.source.source import Function, Source
from torchtrim.source.uses import loads, stores

_FORMS = ("torch.repeat_interleave(X, R, **REST)", "X.repeat_interleave(R, **REST)")
_MADE = (
    "torch.tensor(L, **REST)",
    "torch.as_tensor(L, **REST)",
    "torch.LongTensor(L)",
    "torch.tensor(L, **REST).to(D, **MORE)",
    "torch.as_tensor(L, **REST).to(D, **MORE)",
)


def find(source: Source) -> Iterator[Match]:
    """Repeats whose length is not given."""
    for node in source.at({(ast.Call, "repeat_interleave")}):
        assert isinstance(node, ast.Call)
        if any(word.arg == "output_size" for word in node.keywords):
            continue
        for form in _FORMS:
            bound = match_form(form, node, source)
            if bound is not None and source.dotted(node.func) in (None, "torch.repeat_interleave"):
                yield Match(fix=FIX, source=source, node=node, parts=bound.parts)
                break


def write(match: Match, facts: Facts) -> Writing:
    """The same call, with the sum of the list."""
    source, node = match.source, match.node
    assert isinstance(node, ast.Call)
    facts.need(
        f"`{match.text('R')[:60]}` is a tensor", lambda v: is_tensor(v.R) and len(v.R.shape) == 1
    )
    numbers = _numbers(match)
    if numbers is None:
        raise Refused(
            "the host is not seen to know how long the result is. If it does, write "
            f"`output_size=n` in this call, with n the sum of `{match.text('R')[:60]}`: the length of what "
            "the result goes with, or the sum of the list that the counts came from"
        )
    last = max([*node.args, *(word.value for word in node.keywords)], key=source.end)
    at = source.end(last)
    edits = (Edit(at, at, f", output_size=sum({numbers}) if len({numbers}) != 1 else None"),)
    if source.text[at : source.end(node) - 1].strip(" \t\r\n,"):
        raise Refused("its last argument is in parentheses, or has a comment behind it")
    check_comments(source, edits)
    return Writing(edits)


def _numbers(match: Match) -> str | None:
    """The list that the counts were made of, as it is there, unchanged."""
    source, counts = match.source, match.parts["R"]
    function = source.function(match.node)
    if not isinstance(counts, ast.Name) or not isinstance(function, Function):
        return None
    if not is_private(source, function, counts.id):
        return None
    made = [source.parents[one] for one in stores(function, counts.id)]
    if len(made) != 1 or not isinstance(made[0], ast.Assign) or made[0].lineno > match.node.lineno:  # type: ignore[attr-defined]
        return None
    if source.loop(made[0]) is not source.loop(match.node):
        return None
    bounds = (match_form(form, made[0].value, source) for form in _MADE)
    parts = next((bound.parts for bound in bounds if bound is not None), {})
    numbers = parts.get("L")
    if not isinstance(numbers, ast.Name) or numbers.id in _arguments(function):
        return None
    unchanged = all(_only_listed(source, use) for use in loads(function, numbers.id))
    once = len(list(stores(function, numbers.id))) == 1 and is_private(source, function, numbers.id)
    read = all(only_reads(source, use) for use in loads(function, counts.id) if use is not counts)
    return (
        numbers.id if unchanged and once and read and _is_new(source, function, numbers) else None
    )


def _only_listed(source: Source, use: ast.Name) -> bool:
    outer = source.parents[use]
    if isinstance(outer, ast.Call) and use in outer.args:
        name = source.dotted(outer.func) or str(getattr(outer.func, "id", ""))
        return name in ("sum", "len", "max", "min") or name.startswith("torch.")
    return isinstance(outer, ast.comprehension | ast.For) and outer.iter is use


def _is_new(source: Source, function: ast.AST, numbers: ast.Name) -> bool:
    (store,) = stores(function, numbers.id)
    assign = source.parents[store]
    return isinstance(assign, ast.Assign) and isinstance(assign.value, ast.List | ast.ListComp)


def _arguments(function: ast.AST) -> set[str]:
    return {one.arg for one in ast.walk(function) if isinstance(one, ast.arg)}


FIX = Fix(codes=("TT102", "TT101"), equivalence="BITWISE", find=find, write=write)
