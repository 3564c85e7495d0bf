"""Reductions over selected elements."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import NamedTuple

from torchtrim.rewriter.dense import (
    Dense,
    named_mask,
    named_values,
    need_order,
    spliced,
)
from torchtrim.rewriter.fix import Fix, Match, TextEdit, Writing
from torchtrim.rewriter.replace import atom, fresh, insert_before, instead, torch_of
from torchtrim.source.facts import (
    Facts,
    FixRefused,
    is_floating,
    is_integral,
    is_mask,
    without_grad,
)
from torchtrim.source.forms import equal
from torchtrim.source.nodes import constant_of, keywords_of, receiver
from torchtrim.source.operations import is_simple
from torchtrim.source.selections import (
    LOSSES,
    Selection,
    Tree,
    need_fit,
    read_tree,
    selection,
    syncs_of,
)
from torchtrim.source.source import SourceFile

_FILLS = {"sum": "0", "mean": "0", "count_nonzero": "0", "any": "False", "all": "True"}
_FUNCTIONAL = "torch.nn.functional."


class _Reduction(NamedTuple):
    """A reduction of selected elements. `rows`: over the selection only. `loss`: the call itself reduces."""

    inner: ast.expr
    kind: str
    rows: bool
    loss: bool
    named: tuple[ast.Assign, ...]
    tree: Tree


def _find_masked_reduction(source: SourceFile) -> Iterator[Match]:
    for node in source.each(ast.Call):
        if found := _reduction(node, source):
            yield Match(
                fix=MASKED_REDUCTION,
                source=source,
                node=node,
                parts={**found.tree.parts(), "R": found.inner},
                begin=min(found.named, key=source.start, default=None),
                syncs=found.tree.syncs,
            )


def _write_masked_reduction(match: Match, facts: Facts) -> Writing:
    source, node = match.source, match.node_as(ast.Call)
    found = _reduction(node, source)
    assert found is not None
    need_fit(facts, found.tree, source)
    if found.kind == "mean":
        facts.need("the mean is over floating-point numbers", lambda v: is_floating(v.R))
    torch, imports = torch_of(source)
    at = min([node, *(assign.value for assign in found.named)], key=source.start)
    dense = Dense(match, facts, found.tree, at=at, torch=torch)
    exact = facts.holds(lambda v: is_integral(v.R))
    dense.flows = dense.flows and not exact and found.inner is not found.tree.leaves[0][0].node
    edits = [*dense.edits, *imports, *dense.elsewhere(found.inner)]
    text = _reduced(dense, facts, found, torch, _inner(dense, found, source))
    edits.append(instead(source, node, text))
    return Writing(
        tuple(edits),
        equivalence="BITWISE" if exact and not found.tree.rounded else None,
    )


def _reduction(node: ast.Call, source: SourceFile) -> _Reduction | None:
    shape = _of_loss(node, source) or _of_call(node, source)
    if shape is None:
        return None
    inner, kind, rows, loss = shape
    names = named_values(source, node)
    if (tree := read_tree(inner, source, names, reduced=loss)) is None:
        return None
    leaves = {leaf.node for leaf, _ in tree.leaves}
    named = tuple(one for one in names.values() if not leaves.isdisjoint(ast.walk(one.value)))
    return _Reduction(inner, kind, rows, loss, named, tree)


def _of_loss(node: ast.Call, source: SourceFile) -> tuple[ast.expr, str, bool, bool] | None:
    last = (source.dotted(node.func) or "").removeprefix(_FUNCTIONAL)
    if last not in LOSSES or len(node.args) > 2 + last.startswith("binary"):
        return None
    reduction = constant_of(keywords_of(node).get("reduction", ast.Constant("mean")))
    return (node, str(reduction), False, True) if reduction in ("mean", "sum") else None


def _of_call(node: ast.Call, source: SourceFile) -> tuple[ast.expr, str, bool, bool] | None:
    if (dotted := source.dotted(node.func)) is not None:
        kind, given = dotted.removeprefix("torch."), node.args
    elif isinstance(node.func, ast.Attribute):
        kind, given = node.func.attr, [node.func.value, *node.args]
    else:
        return None
    dims = [word.value for word in node.keywords if word.arg in ("dim", "axis")] + given[1:]
    if kind not in _FILLS or not given or len(node.keywords) + len(given) - 1 != len(dims):
        return None
    if len(dims) > 1 or not all(repr(constant_of(dim)) == "0" for dim in dims):
        return None
    return given[0], kind, bool(dims), False


def _inner(dense: Dense, found: _Reduction, source: SourceFile) -> str:
    if not found.loss:
        return dense.text(found.inner)
    assert isinstance(found.inner, ast.Call)
    words = {word.arg: word for word in found.inner.keywords}
    if "reduction" in words:
        return dense.text(found.inner, {words["reduction"]: 'reduction="none"'})
    last = max([*found.inner.args, *found.inner.keywords], key=source.start)
    return dense.text(found.inner, after=(last, ', reduction="none"'))


def _reduced(dense: Dense, facts: Facts, found: _Reduction, torch: str, inner: str) -> str:
    of_truths = facts.holds(lambda v: v.R.dtype == "bool")
    fill = "False" if of_truths and _FILLS[found.kind] == "0" else _FILLS[found.kind]
    kept = dense.kept(inner, fill)
    dims = ""
    if found.rows:
        rank = facts.only("the number of the mask's dimensions", lambda v: len(v.M.shape), 1)
        dims = "0" if rank == 1 else f"({', '.join(map(str, range(rank)))})"
    if found.kind != "mean":
        return f"{kept}.{found.kind}({dims})"
    if dense.behind and not found.rows:
        behind = [str(-1 - n) for n in range(dense.behind)]
        kept += f".mean({behind[0]})" if len(behind) == 1 else f".mean(({', '.join(behind)}))"
    dtype = facts.only("the type of the result", lambda v: v.R.dtype, "")
    if dtype not in ("float16", "bfloat16"):
        return f"{kept}.sum({dims}) / {dense.mask}.sum()"
    dims = f"{dims}, " if dims else ""
    return f"({kept}.sum({dims}dtype={torch}.float32) / {dense.mask}.sum()).to({torch}.{dtype})"


MASKED_REDUCTION: Fix = Fix(
    name="masked_reduction",
    doc="""`x[mask].mean()` and similar reductions run over all elements, with the unselected ones left out.

    A selection by a mask has as many elements as the mask has true ones, so the host waits to learn how many:
    once per selection, and once more in backward. An elementwise or row-wise computation on the selected
    elements can run on all elements if the unselected ones are removed before the sum: `torch.where(mask,
    ..., 0).sum()`. A mean is that sum divided by the number of true elements; with no true element it is NaN,
    as before. Where gradients flow, unselected inputs become 1: a NaN or infinity there would come back as a
    NaN gradient although its value is dropped. The same holds for `mse_loss(x[mask], y[mask])` and other
    elementwise losses, and for a selection with a name that is read only there.

    Sums of floating-point numbers use another order, so they agree up to rounding. Counts, `any` and
    `all` are exact.

    Refused if the selection is combined with a tensor of its own length that is not a selection by the same
    mask, and if the index is not a mask.

    Without a run, the source has to show that the mask has all dimensions of each tensor, as `x >
    0` has those of `x`.
    """,
    codes=("TT102",),
    equivalence="ROUNDING",
    find=_find_masked_reduction,
    write=_write_masked_reduction,
)


_LOSSES = ("torch.nn.functional.cross_entropy", "torch.nn.functional.nll_loss")
_LABELS = ("int64", "int32")


class _Loss(NamedTuple):
    """A loss call, the selections of scores and labels, and the assignments that name them."""

    call: ast.Call
    scores: Selection
    labels: Selection
    assigned: tuple[ast.Assign, ...]


def _find_masked_cross_entropy(source: SourceFile) -> Iterator[Match]:
    for node in source.each(ast.Call):
        if found := _loss(node, source):
            scores, labels = found.scores, found.labels
            yield Match(
                fix=MASKED_CROSS_ENTROPY,
                source=source,
                node=node,
                parts={"X": scores.tensor, "Y": labels.tensor, "M": scores.mask},
                begin=min(found.assigned, key=source.start, default=None),
                syncs=syncs_of((scores, labels)),
            )


def _loss(node: ast.Call, source: SourceFile) -> _Loss | None:
    if source.dotted(node.func) not in _LOSSES or len(node.args) != 2:
        return None
    names = named_values(source, node)
    chosen: list[Selection] = []
    assigned: list[ast.Assign] = []
    for argument in node.args:
        inner = argument
        while isinstance(inner, ast.Call) and not inner.args and not inner.keywords:
            if (tensor := receiver(inner, ("float", "double", "long"))) is None:
                break
            inner = tensor
        named = names.get(inner.id) if isinstance(inner, ast.Name) else None
        found = selection(inner if named is None else named.value, source)
        if found is not None and not found.flat:
            chosen.append(found)
            assigned += [named] if named is not None else []
    if len(chosen) != 2 or not equal(chosen[0].mask, chosen[1].mask):
        return None
    return _Loss(node, chosen[0], chosen[1], tuple(assigned))


def _write_masked_cross_entropy(match: Match, facts: Facts) -> Writing:
    source, node = match.source, match.node_as(ast.Call)
    found, words = _loss(node, source), keywords_of(node)
    assert found is not None
    _check_words(words)
    facts.need(
        f"`{match.text('M')}` is a mask with the shape and device of `{match.text('Y')}`",
        lambda v: is_mask(v.M, v.Y) and v.M.shape == v.Y.shape,
    )
    facts.need(
        f"`{match.text('X')}` has one more dimension, of scores",
        lambda v: (
            len(v.X.shape) == len(v.Y.shape) + 1
            and v.X.shape[:-1] == v.Y.shape
            and v.X.device == v.Y.device
            and is_floating(v.X)
        ),
    )
    facts.need(f"`{match.text('Y')}` holds class indices", lambda v: v.Y.dtype in _LABELS)
    torch, imports = torch_of(source)
    at = min([node, *(one.value for one in found.assigned)], key=source.start)
    mask, before = named_mask(source, found.scores.mask, at)
    tree = Tree(found.scores.mask, leaves=[(found.scores, 0), (found.labels, 0)])
    need_order(source, tree, hoisted=bool(before))
    ignored = words.get("ignore_index")
    label = "-100" if ignored is None else source.segment(ignored)
    scores = atom(source, found.scores.tensor)
    if not facts.holds(lambda v: without_grad(v, v.X)):
        scores += f".masked_fill(~{mask}.unsqueeze(-1), 0)"
    labels = atom(source, found.labels.tensor).removesuffix(".long()")
    labels = f"{torch}.where({mask}, {labels}.long(), {label})"  # of 8 bits, -100 is none
    if facts.only("the number of dimensions of the labels", lambda v: len(v.Y.shape), 0) != 1:
        scores, labels = f"{scores}.flatten(0, -2)", f"{labels}.flatten()"
    texts: dict[ast.AST, str] = {found.scores.node: scores, found.labels.node: labels}
    own = found.scores.node not in [one.value for one in found.assigned]
    if own and len(scores) > _LONG:
        name = texts[found.scores.node] = fresh(source, node, "rows")
        before = (*before, insert_before(source, node, f"{name} = {scores}"))
    return Writing((*before, *imports, *_edits(source, found, texts)))


_LONG = 40
"""Arbitrary: a longer argument gets a name, since a call with two of them takes several lines."""


def _edits(source: SourceFile, found: _Loss, texts: dict[ast.AST, str]) -> Iterator[TextEdit]:
    named = [assign.value for assign in found.assigned]
    for node in named:
        yield TextEdit.of(source, node, texts[node])
    if inner := {node: text for node, text in texts.items() if node not in named}:
        yield TextEdit.of(source, found.call, spliced(source, found.call, inner))


def _check_words(words: dict[str | None, ast.expr]) -> None:
    if constant_of(words.get("reduction", ast.Constant("mean"))) not in ("mean", "sum"):
        raise FixRefused("its result would have another shape; only means and sums keep it")
    if "size_average" in words or "reduce" in words or None in words:
        raise FixRefused("it uses `size_average`, `reduce` or `**`; use `reduction`")
    if "ignore_index" in words and not is_simple(words["ignore_index"]):
        raise FixRefused("the label to ignore is computed. Assign it to a name first")


MASKED_CROSS_ENTROPY: Fix = Fix(
    name="masked_cross_entropy",
    doc="""`cross_entropy(scores[mask], labels[mask])` becomes a cross entropy that ignores the unselected
    rows.

    A selection by a mask has as many rows as the mask has true elements, so the host waits to learn how many:
    once per selection, and once more in backward. Instead, unselected rows get the label that `cross_entropy`
    ignores, and score 0, so that a NaN or infinity in them reaches neither the loss nor a gradient. The sum
    uses another order, so it agrees up to rounding. If no row is selected, both means are NaN. The same holds
    for `nll_loss`, and for selections with names that are read only there.

    Refused with `reduction="none"`, whose result has the length of the selection, and with labels that are
    probabilities.
    """,
    codes=("TT102",),
    equivalence="ROUNDING",
    find=_find_masked_cross_entropy,
    write=_write_masked_cross_entropy,
)


FIXES = (MASKED_CROSS_ENTROPY, MASKED_REDUCTION)
