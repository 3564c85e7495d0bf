"""Repeats whose length the host already knows, or does not need."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from torchtrim.rewriter.fix import Fix, Match, TextEdit, Writing
from torchtrim.rewriter.replace import check_comments, replace
from torchtrim.source.facts import Facts, FixRefused, are_lengths, is_number, is_tensor
from torchtrim.source.forms import match_form, root
from torchtrim.source.names import is_private, loads, only_reads, stores
from torchtrim.source.source import Function, SourceFile

_ROWS = "torch.tensor([[A] * N + [B] * (S - N) for N in L], **REST)"
_ROW = "[A] * N + [B] * (S - N)"


def _find_repeated_list(source: SourceFile) -> Iterator[Match]:
    inside: set[int] = set()
    for node in source.at({root(_ROWS), root(_ROW)}):
        bound = match_form(_ROWS, node, source)
        if bound is not None and _is_plain(bound.keywords["REST"], source):
            inside |= {id(part) for part in ast.walk(node)}
            assert isinstance(node, ast.expr)
            parts = {name: bound.parts[name] for name in "ABSL"} | {"R": node}
            yield Match(fix=REPEATED_LIST, source=source, node=node, parts=parts, form=_ROWS)
        elif id(node) not in inside and (bound := match_form(_ROW, node, source)) is not None:
            yield Match(fix=REPEATED_LIST, source=source, node=node, parts=bound.parts, form=_ROW)


def _is_plain(words: list[ast.keyword], source: SourceFile) -> bool:
    """Return True if the keywords give only a device and the boolean type."""
    return all(
        word.arg == "device" or (word.arg == "dtype" and source.dotted(word.value) == "torch.bool")
        for word in words
    )


def _write_repeated_list(match: Match, facts: Facts) -> Writing:
    if match.form == _ROW:
        raise FixRefused(
            "the host reads the number of repeats for each row. To compute all rows at once, write "
            "`torch.arange(size, device=lengths.device) >= lengths[:, None]`"
        )
    kinds = [_constant(match.parts[name]) for name in "AB"]
    if kinds not in ([False, True], [True, False]):
        raise FixRefused(
            "the two values are not True and False; use `torch.where` on a comparison of positions"
        )
    devices = {v.R.device for v in facts.executions if v.has("R")}
    facts.need(
        f"`{match.text('L')}` is a one-dimensional integer tensor on the result's device",
        lambda v: not v.has("L") or (are_lengths(v.L) and v.L.device in devices),
    )
    facts.need(
        f"`{match.text('S')}` is a Python number", lambda v: not v.has("S") or is_number(v.S)
    )
    sign = "<" if kinds[0] else ">="
    return Writing(
        replace(match, f"torch.arange(S, device=L.device) {sign} L[:, None]", {"L": "lengths"}),
        risk=f"a length above `{match.text('S')[:40]}`, or below zero, would make the original's rows "
        "longer; without any lengths the shape differs. Apply the fix if that cannot happen",
    )


def _constant(node: ast.expr) -> object:
    return node.value if isinstance(node, ast.Constant) else None


REPEATED_LIST: Fix = Fix(
    name="repeated_list",
    doc="""`[[False] * n + [True] * (size - n) for n in lengths]` becomes a comparison of positions with
    lengths.

    To repeat a list as often as a tensor says, the host reads the tensor twice for each row.
    `torch.arange(size) >= lengths[:, None]` computes all rows at once. A length above `size` or below zero
    would lengthen the original's rows, or be an error, and no run can rule that out: the fix is suggested,
    not applied.

    Refused if a loop of statements builds the list piece by piece; the reason contains the line to write.
    """,
    codes=("TT101",),
    equivalence="BITWISE",
    find=_find_repeated_list,
    write=_write_repeated_list,
)


_FORMS = ("torch.repeat_interleave(X, R, **REST)", "X.repeat_interleave(R, **REST)")
_MADE = (
    "torch.tensor(L, **REST)",
    "torch.as_tensor(L, **REST)",
    "torch.LongTensor(L)",
    "torch.tensor(L, **REST).to(D, **MORE)",
    "torch.as_tensor(L, **REST).to(D, **MORE)",
)


def _find_known_repeats(source: SourceFile) -> Iterator[Match]:
    for node in source.at({(ast.Call, "repeat_interleave")}):
        assert isinstance(node, ast.Call)
        if any(word.arg == "output_size" for word in node.keywords):
            continue
        for form in _FORMS:
            bound = match_form(form, node, source)
            if bound is not None and source.dotted(node.func) in (None, "torch.repeat_interleave"):
                yield Match(fix=KNOWN_REPEATS, source=source, node=node, parts=bound.parts)
                break


def _write_known_repeats(match: Match, facts: Facts) -> Writing:
    source, node = match.source, match.node
    assert isinstance(node, ast.Call)
    facts.need(
        f"`{match.text('R')[:60]}` is a tensor", lambda v: is_tensor(v.R) and len(v.R.shape) == 1
    )
    numbers = _numbers(match)
    if numbers is None:
        raise FixRefused(
            "the code does not show that the host knows the result's length. If it does, write "
            f"`output_size=n` in this call, with n the sum of `{match.text('R')[:60]}`: the length of a "
            "tensor that the result is combined with, or the sum of the list behind the counts"
        )
    last = max([*node.args, *(word.value for word in node.keywords)], key=source.end)
    at = source.end(last)
    edits = (TextEdit(at, at, f", output_size=sum({numbers}) if len({numbers}) != 1 else None"),)
    if source.text[at : source.end(node) - 1].strip(" \t\r\n,"):
        raise FixRefused("its last argument is in parentheses or followed by a comment")
    check_comments(source, edits)
    return Writing(edits)


def _numbers(match: Match) -> str | None:
    """Return the name of the unchanged list that the counts were created from, or None."""
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


def _only_listed(source: SourceFile, use: ast.Name) -> bool:
    outer = source.parents[use]
    if isinstance(outer, ast.Call) and use in outer.args:
        name = source.dotted(outer.func) or str(getattr(outer.func, "id", ""))
        return name in ("sum", "len", "max", "min") or name.startswith("torch.")
    return isinstance(outer, ast.comprehension | ast.For) and outer.iter is use


def _is_new(source: SourceFile, function: ast.AST, numbers: ast.Name) -> bool:
    (store,) = stores(function, numbers.id)
    assign = source.parents[store]
    return isinstance(assign, ast.Assign) and isinstance(assign.value, ast.List | ast.ListComp)


def _arguments(function: ast.AST) -> set[str]:
    return {one.arg for one in ast.walk(function) if isinstance(one, ast.arg)}


KNOWN_REPEATS: Fix = Fix(
    name="known_repeats",
    doc="""`torch.repeat_interleave(x, counts)` gets `output_size`, if the host has the counts.

    The result's length is the sum of the counts, which are on the device, so the host waits. If the same
    function created `counts` from a list, `torch.tensor(numbers)`, that length is the sum of the list. A list
    of one number may apply to all rows: then the device is read, as before.

    Refused if the code does not show that the host knows the length: a wrong size goes undetected, and memory
    outside the result is read or written. The reason contains the line to write.
    """,
    codes=("TT102", "TT101"),
    equivalence="BITWISE",
    find=_find_known_repeats,
    write=_write_known_repeats,
)


FIXES = (KNOWN_REPEATS, REPEATED_LIST)
