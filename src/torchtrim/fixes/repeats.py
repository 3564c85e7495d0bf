"""Repeats whose length the host already knows, or does not need."""

from __future__ import annotations

import ast
import dataclasses
from collections.abc import Iterator

from torchtrim.rewriter.fix import Fix, Match, Writing, of_forms
from torchtrim.rewriter.replace import added_keyword, deleted, instead, replace
from torchtrim.source.facts import Facts, FixRefused, are_lengths, is_number, is_tensor
from torchtrim.source.forms import match_form, places
from torchtrim.source.names import (
    assigned_name,
    assignment_before,
    changes_nothing,
    is_private,
    loads,
    only_reads,
    parameters,
    stores,
)
from torchtrim.source.nodes import constant_of, function_of, keywords_of, name_set, receiver
from torchtrim.source.source import Function, SourceFile
from torchtrim.source.transfers import has_own_text, read_of

_ROWS = "torch.tensor([[A] * N + [B] * (S - N) for N in L], **REST)"
_ROW = "[A] * N + [B] * (S - N)"


def _find_repeated_list(source: SourceFile) -> Iterator[Match]:
    inside: set[ast.AST] = set()
    for node, form, bound in places((_ROWS, _ROW), source):
        parts = bound.parts
        if form == _ROWS and _is_plain(bound.keywords["REST"], source):
            assert isinstance(node, ast.expr)
            inside.update(ast.walk(node))
            parts = {name: parts[name] for name in "ABSL"} | {"R": node}
        elif form == _ROWS or node in inside:
            continue
        yield Match(fix=REPEATED_LIST, source=source, node=node, parts=parts, form=form)


def _is_plain(words: list[ast.keyword], source: SourceFile) -> bool:
    """Return True if the keywords give only a device and the boolean type."""
    return all(
        word.arg == "device" or (word.arg == "dtype" and source.dotted(word.value) == "torch.bool")
        for word in words
    )


def _write_repeated_list(match: Match, facts: Facts) -> Writing:
    if match.form == _ROW:
        raise FixRefused(
            "the host reads each row. Write `torch.arange(size, device=lengths.device) >= "
            "lengths[:, None]`"
        )
    kinds = [constant_of(match.parts[name]) for name in "AB"]
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
    for match in of_forms(lambda: KNOWN_REPEATS, *_FORMS)(source):
        assert isinstance(match.node, ast.Call)
        known = source.dotted(match.node.func) in (None, "torch.repeat_interleave")
        if known and "output_size" not in keywords_of(match.node):
            counted = receiver(match.parts["R"], ("sum",))
            mask = {"M": counted} if isinstance(counted, ast.Name) else {}
            yield dataclasses.replace(match, parts={**match.parts, **mask})


def _write_known_repeats(match: Match, facts: Facts) -> Writing:
    source, node = match.source, match.node_as(ast.Call)
    facts.need(
        f"`{match.text('R')[:60]}` is a tensor", lambda v: is_tensor(v.R) and len(v.R.shape) == 1
    )
    if (selected := _selected(match)) is not None:
        match.need(facts, "M", "is a boolean mask", lambda seen: seen.dtype == "bool", static=True)
        return Writing((added_keyword(source, node, f"output_size=len({selected})"),))
    if (numbers := _numbers(match)) is None:
        if (size := _size_beside(match)) is None:
            raise FixRefused(
                "the host may not know the length. If it does, write `output_size=n`, the sum of "
                f"`{match.text('R')[:40]}`"
            )
        counts = match.text("R")[:40]
        return Writing(
            (added_keyword(source, node, f"output_size={size}"),),
            advice=f"if `{counts}` adds up to `{size}`, which the code after it suggests, the host knows",
        )
    size = f"output_size=sum({numbers}) if len({numbers}) != 1 else None"
    return Writing((added_keyword(source, node, size),))


def _numbers(match: Match) -> str | None:
    """Return the name of the unchanged list that the counts were created from, or None."""
    source, counts = match.source, match.parts["R"]
    function = source.function(match.node)
    if not isinstance(counts, ast.Name) or not isinstance(function, Function):
        return None
    if not is_private(source, function, counts.id):
        return None
    assigns = [source.parents[store] for store in stores(function, counts.id)]
    assign = assigns[0] if len(assigns) == 1 else None
    if not isinstance(assign, ast.Assign) or assign.lineno > counts.lineno:
        return None
    if source.loop(assign) is not source.loop(match.node):
        return None
    bounds = (match_form(form, assign.value, source) for form in _MADE)
    parts = next((bound.parts for bound in bounds if bound is not None), {})
    numbers = parts.get("L")
    if not isinstance(numbers, ast.Name) or numbers.id in parameters(function):
        return None
    listed = [source.parents[store] for store in stores(function, numbers.id)]
    safe = (
        len(listed) == 1
        and isinstance(listed[0], ast.Assign)
        and isinstance(listed[0].value, ast.List | ast.ListComp)
        and is_private(source, function, numbers.id)
        and all(_only_listed(source, use) for use in loads(function, numbers.id))
        and all(only_reads(source, use) for use in loads(function, counts.id) if use is not counts)
    )
    return numbers.id if safe else None


def _selected(match: Match) -> str | None:
    """Return the name of `x[mask]`, whose length is the sum of the counts `mask.sum(1)`, or None."""
    source, mask = match.source, match.parts.get("M")
    function = source.function(match.node)
    if not isinstance(mask, ast.Name) or not is_private(source, function, mask.id):
        return None
    made = assignment_before(source, mask.id, source.statement(match.node))
    kept = len(stores(function, mask.id)) == 1 and made is not None
    if not kept or not all(_only_selects(source, use) for use in loads(function, mask.id)):
        return None
    for use in loads(function, mask.id):
        outer = source.parents[use]
        name = assigned_name(source.statement(use)) if isinstance(outer, ast.Subscript) else None
        if name is None or len(stores(function, name)) > 1:
            continue
        chosen = assignment_before(source, name, source.statement(match.node))
        if chosen is not None and chosen.value is outer:
            return name
    return None


def _only_selects(source: SourceFile, use: ast.Name) -> bool:
    outer = source.parents[use]
    return (isinstance(outer, ast.Subscript) and outer.slice is use) or only_reads(source, use)


def _size_beside(match: Match) -> str | None:
    """Return the size of the tensor that the repeats are combined with in arithmetic, or None."""
    source, node = match.source, match.node_as(ast.Call)
    name = assigned_name(source.statement(node))
    words = keywords_of(node)
    dim = words.get("dim", match.keywords["REST"][0].value if match.keywords.get("REST") else None)
    for use in loads(source.function(node), name) if name and dim is not None else ():
        outer = source.parents[use]
        if isinstance(outer, ast.BinOp) and use.lineno > node.lineno:
            beside = outer.left if outer.right is use else outer.right
            if isinstance(beside, ast.Name) and beside.id != name:
                assert dim is not None
                return f"{beside.id}.size({source.segment(dim)})"
    return None


def _only_listed(source: SourceFile, use: ast.Name) -> bool:
    outer = source.parents[use]
    if isinstance(outer, ast.Call) and use in outer.args:
        name = source.dotted(outer.func) or function_of(outer)
        return name in ("sum", "len", "max", "min") or name.startswith("torch.")
    return isinstance(outer, ast.comprehension | ast.For) and outer.iter is use


KNOWN_REPEATS: Fix = Fix(
    name="known_repeats",
    doc="""`torch.repeat_interleave(x, counts)` gets `output_size`, if the host has the counts.

    The result's length is the sum of the counts, which are on the device, so the host waits. If the same
    function created `counts` from a list, `torch.tensor(numbers)`, that length is the sum of the list. A list
    of one number may apply to all rows: then the device is read, as before. The sum of `mask.sum(1)` is the
    length of `x[mask]`.

    Where the result is combined with another tensor, whose size it then has to have, that size is shown as a
    diff to copy. Refused if the code does not show that the host knows the length: a wrong size goes
    undetected, and memory outside the result is read or written. The reason contains the line to write.
    """,
    codes=("TT102", "TT101"),
    equivalence="BITWISE",
    find=_find_known_repeats,
    write=_write_known_repeats,
)


_REPEATS = (
    "torch.repeat_interleave(R)",
    "torch.repeat_interleave(X, R, **REST)",
    "X.repeat_interleave(R, **REST)",
)
_ORDERS = name_set("view reshape flatten ravel t transpose permute contiguous")
"""Methods whose result has the same elements, maybe in another order."""


def _find_counted_ranges(source: SourceFile) -> Iterator[Match]:
    for node in source.calls("arange"):
        if source.dotted(node.func) != "torch.arange" or len(node.args) != 1:
            continue
        counts = _summed(source, node.args[0])
        if counts is not None and has_own_text(source, node):
            yield Match(fix=COUNTED_RANGE, source=source, node=node, parts={"R": counts})


def _summed(source: SourceFile, node: ast.expr) -> ast.expr | None:
    """Return what a number is the sum of, also through a name or a read in its place."""
    if isinstance(node, ast.Name):
        assign = assignment_before(source, node.id, source.statement(node))
        node = assign.value if assign is not None else node
    elif (read := read_of(node, source)) and read.cast in ("", "int"):
        node = read.tensor
    if not isinstance(node, ast.Call) or node.keywords:
        return None
    if source.dotted(node.func) == "torch.sum" and len(node.args) == 1:
        return node.args[0]
    return None if node.args else receiver(node, ("sum",))


def _write_counted_range(match: Match, facts: Facts) -> Writing:
    source, node = match.source, match.node_as(ast.Call)
    match.need(facts, "R", "is a tensor", is_tensor, static=True)
    count = node.args[0]
    for repeats, counts, rows in _repeats_before(match):
        root = _root(source, counts)
        if root is None or root != _root(source, match.parts["R"]):
            continue
        used = [*stores(source.function(node), count.id)] if isinstance(count, ast.Name) else []
        made = [source.statement(store) for store in used]
        if _is_kept(match, [repeats, *made]):
            alone = used and len(made) == len(loads(source.function(node), used[0].id)) == 1
            left = [deleted(source, made[0])] if alone else []
            name = assigned_name(repeats)
            text = ast.unparse(counts)
            one_each = rows is None or _is_range_over(source, rows, text)
            risk = f"if `{text[:60]}` has one element, it may apply to several rows"
            return Writing(
                (instead(source, count, f"{name}.shape[0]"), *left), "" if one_each else risk
            )
    raise FixRefused(
        "no `repeat_interleave` before it has that many rows. Pass a size that the host knows"
    )


def _repeats_before(match: Match) -> Iterator[tuple[ast.stmt, ast.expr, ast.expr | None]]:
    """Yield the assignments of repeats that certainly ran before, with the counts, and the repeated rows."""
    source = match.source
    function, here = source.function(match.node), source.statement(match.node)
    for call in source.calls("repeat_interleave"):
        statement = source.statement(call)
        name = assigned_name(statement)
        if name is None or source.parents[call] is not statement:
            continue
        once = len(stores(function, name)) == 1 and is_private(source, function, name)
        if once and assignment_before(source, name, here) is statement:
            bounds = (match_form(form, call, source) for form in _REPEATS)
            parts = next((bound.parts for bound in bounds if bound is not None), {})
            if "R" in parts:
                yield statement, parts["R"], parts.get("X")


def _is_range_over(source: SourceFile, rows: ast.expr, counts: str) -> bool:
    """Return True for `torch.arange(len(counts))`: as many rows as counts."""
    if not isinstance(rows, ast.Call) or source.dotted(rows.func) != "torch.arange":
        return False
    sizes = (f"{counts}.shape[0]", f"{counts}.size(0)", f"{counts}.numel()", f"len({counts})")
    return len(rows.args) == 1 and ast.unparse(rows.args[0]) in sizes


def _root(source: SourceFile, node: ast.expr) -> str | None:
    """Return the name whose elements a value has, in any order, if each name on the way has one value."""
    while not isinstance(node, ast.Name):
        if (inner := receiver(node, _ORDERS)) is None or any(
            source.dotted(one) for one in getattr(node, "args", ())
        ):
            return None
        node = inner
    function = source.function(node)
    bound, given = stores(function, node.id), node.id in parameters(function)
    if not bound:
        return node.id if given else None
    assign = assignment_before(source, node.id, source.statement(node))
    if assign is None or given or len(bound) > 1 or not is_private(source, function, node.id):
        return None
    return _root(source, assign.value) or node.id


def _is_kept(match: Match, made: list[ast.stmt]) -> bool:
    """Return True if no statement from the first of some to the match writes to anything."""
    source, node = match.source, match.node_as(ast.Call)
    first = min(statement.lineno for statement in made)
    same = all(source.loop(one) is source.loop(node) for one in made)
    return same and all(
        changes_nothing(source, one)
        for one in ast.walk(source.function(node))
        if first <= getattr(one, "lineno", 0) < node.lineno
    )


COUNTED_RANGE: Fix = Fix(
    name="counted_range",
    doc="""`torch.arange(counts.sum())` beside `rows = torch.repeat_interleave(counts)` becomes
    `torch.arange(rows.shape[0])`.

    The host waits for the sum of the counts, which is the number of rows that they gave.

    Applies if the counts are the same ones, also reshaped or transposed, and no line in between writes
    to anything. Suggested, not applied, if other rows than `torch.arange(len(counts))` are repeated: one
    count may apply to all of them.
    """,
    codes=("TT101",),
    equivalence="BITWISE",
    find=_find_counted_ranges,
    write=_write_counted_range,
)


FIXES = (COUNTED_RANGE, KNOWN_REPEATS, REPEATED_LIST)
