"""`if mask.any(): x = x.masked_fill(mask, v)` fills without testing whether there is anything to fill.

If no element is true, filling changes nothing, so neither the test nor its sync is needed. The same holds for
`if not torch.isfinite(x).all(): x = torch.nan_to_num(x)`, for in-place fills, and for a mask that is a view
or a part of the tested one.

Refused if `x` would become another tensor that may be written to afterwards, and if it is filled in place
while autograd records it, since backward may need its old value. A mask that does not fit raises no error
while it has no true element; the replacement always raises one.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import NamedTuple

from torchtrim.records.probes import ObservedValue
from torchtrim.rewriter.fix import Fix, Match, TextEdit, Writing, comments
from torchtrim.source.facts import Facts, FixRefused, is_floating, is_number, is_tensor
from torchtrim.source.forms import equal, match_form
from torchtrim.source.names import is_fresh_name, is_private, loads, only_reads
from torchtrim.source.nodes import function_of, receiver
from torchtrim.source.operations import VIEWS, is_pure
from torchtrim.source.source import SourceFile
from torchtrim.source.typed import known_names, operands_in, typed

_ANY = ("M.any()", "torch.any(M)", "M.any().item()", "bool(M.any())", "M.sum() > 0", "M.max()")
_NOT_FINITE = (
    "not X.isfinite().all()",
    "not torch.isfinite(X).all()",
    "not torch.all(torch.isfinite(X))",
    "not torch.isfinite(X).all().item()",
    "(~torch.isfinite(X)).any()",
    "(~X.isfinite()).any()",
    "not torch.isfinite(X)",
    "not X.isfinite()",
)
_FILLS = (
    "X = X.masked_fill(M, V)",
    "X = torch.masked_fill(X, M, V)",
    "X = torch.where(M, V, X)",
    "X[M] = V",
    "X.masked_fill_(M, V)",
)
_IN_PLACE = _FILLS[3:]
_FACT = "the target is a tensor, filled by a mask that fits it"
_CLEANED = ("X = torch.nan_to_num(X, **REST)", "X = X.nan_to_num(**REST)")


class ConditionalFill(NamedTuple):
    """An `if` that tests a mask, its other conditions, and the fill in its body."""

    node: ast.If
    question: ast.expr
    others: list[ast.expr]
    form: str
    parts: dict[str, ast.expr]


def _find(source: SourceFile) -> Iterator[Match]:
    for node in source.each(ast.If):
        if found := fill_of(node, source):
            yield Match(fix=FIX, source=source, node=found.question, parts=_parts(found, source))


def _parts(found: ConditionalFill, source: SourceFile) -> dict[str, ast.expr]:
    """Return the names in the fill, and the next use of its target, since the fill may not have run."""
    parts: dict[str, ast.expr] = {}
    if isinstance(target := found.parts["X"], ast.Name):
        uses = loads(source.function(found.node), target.id)
        if after := [use for use in uses if use.lineno > (found.node.end_lineno or 0)]:
            parts["X2"] = min(after, key=lambda use: (use.lineno, use.col_offset))
    for one in (found.question, *found.parts.values()):
        for name in operands_in(one, source):
            parts[f"N{len(parts)}"] = name
    return parts


def fill_of(node: ast.If, source: SourceFile) -> ConditionalFill | None:
    """Return the fill that an `if` is, or None."""
    if len(node.body) != 1 or node.orelse:
        return None
    values = node.test.values if isinstance(node.test, ast.BoolOp) else [node.test]
    if isinstance(node.test, ast.BoolOp) and not isinstance(node.test.op, ast.And):
        return None
    *others, question = values
    body = node.body[0]
    statement = body.value if isinstance(body, ast.Expr) else body
    for form in (*_FILLS, *_CLEANED):
        if (bound := match_form(form, statement, source)) is None:
            continue
        for text in _NOT_FINITE if form in _CLEANED else _ANY:
            asked = match_form(text, question, source)
            if asked is not None and _asks_for_it(asked.parts, bound.parts):
                return ConditionalFill(node, question, others, form, bound.parts)
    return None


def _asks_for_it(asked: dict[str, ast.expr], filled: dict[str, ast.expr]) -> bool:
    if "M" not in asked:
        return equal(asked["X"], filled["X"])
    mask = filled["M"]
    while not equal(mask, asked["M"]):
        if isinstance(mask, ast.Subscript):
            mask = mask.value
        elif inner := receiver(mask, VIEWS - {"to", "type"}):
            mask = inner
        else:
            return False
    return True


def _write(match: Match, facts: Facts) -> Writing:
    source = match.source
    node = source.statement(match.node)
    assert isinstance(node, ast.If)
    found = fill_of(node, source)
    assert found is not None
    if not isinstance(found.parts["X"], ast.Name | ast.Attribute):
        raise FixRefused("the target is not a name")
    if not all(is_pure(part, source) for part in found.parts.values()):
        raise FixRefused("part of it may have a side effect, and would run each time")
    _need(match, facts, found)
    if found.form not in _IN_PLACE:
        _check_copy(source, found)
    return Writing(_edits(source, found))


def _need(match: Match, facts: Facts, found: ConditionalFill) -> None:
    """Require that the fill keeps the type and shape of its target, even in runs that skipped it."""
    if not facts.seen:
        facts.leave_open(_FACT)
    for values in facts.executions:
        known = known_names(match.parts, values)
        filled = known.get(ast.unparse(found.parts["X"]))
        if filled is None or (not is_floating(filled) and found.form in _CLEANED):
            facts.leave_open(_FACT)
            continue
        if found.form in _CLEANED:
            continue
        _need_mask(match, facts, found, known, filled)
        if found.form in _IN_PLACE and values.grad and filled.requires_grad:
            raise FixRefused("autograd records it, and backward may need its old value")


def _need_mask(
    match: Match,
    facts: Facts,
    found: ConditionalFill,
    known: dict[str, ObservedValue],
    filled: ObservedValue,
) -> None:
    source, value = match.source, found.parts["V"]
    mask = typed(found.parts["M"], source, known)
    number = known.get(ast.unparse(value))
    plain = isinstance(value, ast.Constant | ast.UnaryOp) or (number and is_number(number))
    if not is_tensor(filled):
        raise FixRefused(f"`{source.segment(found.parts['X'])}` is not a tensor")
    if mask is None or mask.dtype != "bool":
        facts.leave_open(_FACT)
    elif not _reaches(mask.shape, filled.shape, leading=found.form == "X[M] = V"):
        raise FixRefused("the mask has another shape than its target")
    elif not plain and function_of(value) != "float":
        facts.leave_open(f"`{source.segment(value)[:60]}` is a Python number")


def _reaches(mask: tuple[int, ...], filled: tuple[int, ...], *, leading: bool) -> bool:
    if leading:
        return len(mask) > 0 and filled[: len(mask)] == mask
    pairs = zip(mask[::-1], filled[::-1], strict=False)
    return len(mask) <= len(filled) and all(one in (1, other) for one, other in pairs)


def _check_copy(source: SourceFile, found: ConditionalFill) -> None:
    target = found.parts["X"]
    if not isinstance(target, ast.Name):
        raise FixRefused(
            "other code may hold the attribute's tensor, and the fix would create a copy"
        )
    if is_fresh_name(source, target.id, found.node):
        return
    function = source.function(found.node)
    own = is_private(source, function, target.id) and not isinstance(function, ast.Module)
    uses = set(loads(function, target.id)).difference(ast.walk(found.node))
    if own and all(only_reads(source, use) for use in uses):
        return
    raise FixRefused(
        f"later in-place writes to `{target.id}` would be lost, which may be an alias. Clone it "
        "first if a copy is right"
    )


def _edits(source: SourceFile, found: ConditionalFill) -> tuple[TextEdit, ...]:
    node, body = found.node, found.node.body[0]
    if found.others:
        return (TextEdit(source.end(found.others[-1]), source.end(found.question), ""),)
    blanks = source.indentation(node)
    if blanks is None or source.text.startswith("elif", source.start(node)):
        raise FixRefused("the statement shares its line with another, or is an `elif`")
    text = source.segment(body)
    kept = [comment for comment in comments(source.segment(node)) if comment not in text]
    return (TextEdit.of(source, node, f"{source.newline}{blanks}".join([*kept, text])),)


FIX = Fix(codes=("TT101",), equivalence="BITWISE", find=_find, write=_write)
