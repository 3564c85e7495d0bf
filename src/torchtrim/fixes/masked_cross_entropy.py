"""`cross_entropy(scores[mask], labels[mask])` becomes a cross entropy that ignores the others.

Selecting by a mask gives as many rows as it has true elements, so the host waits to learn how many,
once for each selection and once more in backward. The rows that are not selected get the label that
`cross_entropy` ignores, and score 0, so that a NaN or infinity in them reaches neither the loss nor a
gradient. The sum is taken in another order: it agrees but for rounding. Where nothing is selected the
mean is NaN in both. The same for `nll_loss`, and for selections that were given a name which is read
nowhere else.

Refused with `reduction="none"`, whose result is as long as the selection, and with labels that are
probabilities.

Ranks that were seen are tested for, which needs no sync; for others the original lines are kept.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import NamedTuple

from torchtrim.rewriter.dense import named_mask, need_order, spliced
from torchtrim.rewriter.fix import Edit, Fix, Match, Writing
from torchtrim.rewriter.guarded import for_kinds_seen
from torchtrim.rewriter.named import named_values
from torchtrim.rewriter.replace import atom, check_comments, torch_of
from torchtrim.source.facts import Facts, Refused, Values, is_floating, is_mask
from torchtrim.source.forms import equal
from torchtrim.source.purity import is_simple
from torchtrim.source.selections import Selection, Tree, selection, syncs_of
from torchtrim.source.source import Source

_LOSSES = ("torch.nn.functional.cross_entropy", "torch.nn.functional.nll_loss")
_CASTS = ("float", "double", "long")
_LABELS = ("int64", "int32")
_RANK = "the number of dimensions of the labels"


class _Loss(NamedTuple):
    """The call, the selections of scores and labels, and the assignments that gave them names."""

    call: ast.Call
    scores: Selection
    labels: Selection
    assigned: tuple[ast.Assign, ...]


def find(source: Source) -> Iterator[Match]:
    """The losses of selected scores and labels."""
    for node in source.each(ast.Call):
        if (found := _read(node, source)) is not None:
            parts = {"X": found.scores.tensor, "Y": found.labels.tensor, "M": found.scores.mask}
            begin = min(found.assigned, key=source.start, default=None)
            syncs = syncs_of((found.scores, found.labels))
            yield Match(fix=FIX, source=source, node=node, parts=parts, begin=begin, syncs=syncs)


def _read(node: ast.Call, source: Source) -> _Loss | None:
    if source.dotted(node.func) not in _LOSSES or len(node.args) != 2:
        return None
    names = named_values(source, node)
    chosen: list[Selection] = []
    assigned: list[ast.Assign] = []
    for argument in node.args:
        inner = _without_casts(argument)
        named = names.get(inner.id) if isinstance(inner, ast.Name) else None
        found = selection(inner if named is None else named.value, source)
        if found is not None and not found.flat:
            chosen.append(found)
            assigned += [named] if named is not None else []
    if len(chosen) != 2 or not equal(chosen[0].mask, chosen[1].mask):
        return None
    return _Loss(node, chosen[0], chosen[1], tuple(assigned))


def _without_casts(node: ast.expr) -> ast.expr:
    """What a type is changed of: `x[mask]` of `x[mask].float()`."""
    while (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr in _CASTS
        and not node.args
        and not node.keywords
    ):
        node = node.func.value
    return node


def write(match: Match, facts: Facts) -> Writing:
    """The same loss over all rows, with those that are not selected ignored."""
    assert isinstance(match.node, ast.Call)
    source, found = match.source, _read(match.node, match.source)
    assert found is not None
    words = {word.arg: word.value for word in match.node.keywords}
    _check_words(words)
    _need(match, facts)
    torch, imports = torch_of(source)
    at = min([match.node, *(one.value for one in found.assigned)], key=source.start)
    mask, before = named_mask(source, found.scores.mask, at)
    tree = Tree(found.scores.mask, leaves=[(found.scores, 0), (found.labels, 0)])
    need_order(source, tree, hoisted=bool(before))
    ignored = words.get("ignore_index")
    label = "-100" if ignored is None else source.segment(ignored)
    scores = f"{atom(source, found.scores.tensor)}.masked_fill(~{mask}.unsqueeze(-1), 0)"
    labels = f"{torch}.where({mask}, {source.segment(found.labels.tensor)}, {label})"
    if facts.only(_RANK, lambda v: len(v.Y.shape), 0) != 1:
        scores, labels = f"{scores}.flatten(0, -2)", f"{labels}.flatten()"
    texts: dict[ast.AST, str] = {found.scores.node: scores, found.labels.node: labels}
    edits = (*before, *imports, *_edits(source, found, texts))
    check_comments(source, edits)
    return Writing(for_kinds_seen(match, facts, edits))


def _edits(source: Source, found: _Loss, texts: dict[ast.AST, str]) -> Iterator[Edit]:
    named = {one.value for one in found.assigned}
    for node in named:
        yield Edit(source.start(node), source.end(node), texts[node])
    inner = {node: text for node, text in texts.items() if node not in named}
    if inner:
        call = found.call
        yield Edit(source.start(call), source.end(call), spliced(source, call, inner))


def _need(match: Match, facts: Facts) -> None:
    facts.need(
        f"`{match.text('M')}` is a mask of the shape of `{match.text('Y')}`, on the same device",
        lambda v: is_mask(v.M, v.Y) and v.M.shape == v.Y.shape,
    )
    facts.need(
        f"`{match.text('X')}` has one dimension more, of scores",
        lambda v: _fits(v) and is_floating(v.X),
    )
    facts.need(f"`{match.text('Y')}` holds class numbers", lambda v: v.Y.dtype in _LABELS)


def _check_words(words: dict[str | None, ast.expr]) -> None:
    reduction = words.get("reduction")
    if reduction is not None and (
        not isinstance(reduction, ast.Constant) or reduction.value not in ("mean", "sum")
    ):
        raise Refused("its result would be of another shape; only the mean and the sum are not")
    if "size_average" in words or "reduce" in words or None in words:
        raise Refused("it uses `size_average`, `reduce` or `**`; say `reduction`")
    if "ignore_index" in words and not is_simple(words["ignore_index"]):
        raise Refused("the label to ignore is computed. Give it a name first")


def _fits(values: Values) -> bool:
    return (
        len(values.X.shape) == len(values.Y.shape) + 1
        and values.X.shape[:-1] == values.Y.shape
        and values.X.device == values.Y.device
    )


FIX = Fix(codes=("TT102",), equivalence="ROUNDING", find=find, write=write)
