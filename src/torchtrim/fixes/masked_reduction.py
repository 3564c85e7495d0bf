"""`x[mask].mean()` and its like become a reduction over all elements, with the others out of the way.

Selecting by a mask gives as many elements as the mask has true ones, so the host waits to learn how
many: once for each selection, and once more in backward. A computation on the selected elements,
each by itself or row by row, can run on all, if those that are not selected are taken out
before the sum: `torch.where(mask, ..., 0).sum()`. A mean is that sum by the number of true elements; of
none it is NaN, as before. Where gradients flow, the inputs get a 1 where nothing is selected: a NaN or
an infinity there would come back as a NaN gradient, though its value is thrown away. The same for
`mse_loss(x[mask], y[mask])` and the other losses that work element by element, and for a selection
that was given a name which is read nowhere else.

A sum of floating numbers is taken in another order: it agrees but for rounding. Counts, `any` and
`all` are exact.

Refused where the selection is combined with something as long as itself that is no selection by the
same mask, and where what must be a mask is none.

Ranks and types that were seen are tested for, which needs no sync; for others the original lines are kept.
Without a run the source has to say that the mask has all dimensions of each tensor, as `x > 0` has those of
`x`.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import NamedTuple

from torchtrim.rewriter.dense import Dense
from torchtrim.rewriter.fix import Fix, Match, Writing
from torchtrim.rewriter.guarded import for_kinds_seen
from torchtrim.rewriter.named import named_values
from torchtrim.rewriter.replace import check_comments, instead, torch_of
from torchtrim.source.facts import Facts, is_floating, is_integral
from torchtrim.source.selections import LOSSES, Tree, need_fit, read_tree
from torchtrim.source.source import Source

_FILLS = {"sum": "0", "mean": "0", "count_nonzero": "0", "any": "False", "all": "True"}
_FUNCTIONAL = "torch.nn.functional."
_HALVES = ("float16", "bfloat16")
_ONE_TYPE = "the type of the result"
_ONE_SHAPE = "the number of the mask's dimensions"


class _Reduction(NamedTuple):
    """The reduced expression and how. `rows`: only over the selection. `loss`: the call reduces by itself."""

    inner: ast.expr
    kind: str
    rows: bool
    loss: bool
    named: tuple[ast.Assign, ...]
    tree: Tree


def find(source: Source) -> Iterator[Match]:
    """The reductions of selections."""
    for node in source.each(ast.Call):
        if (found := _read(node, source)) is not None:
            parts = {**found.tree.parts(), "R": found.inner}
            begin = min(found.named, key=source.start, default=None)
            syncs = found.tree.syncs
            yield Match(fix=FIX, source=source, node=node, parts=parts, begin=begin, syncs=syncs)


def write(match: Match, facts: Facts) -> Writing:
    """The same reduction over all elements."""
    source = match.source
    assert isinstance(match.node, ast.Call)
    found = _read(match.node, source)
    assert found is not None
    _need(match, facts, found)
    torch, imports = torch_of(source)
    assigned = [one.value for one in found.named]
    at = min([match.node, *assigned], key=source.start)
    dense = Dense(match, facts, found.tree, at=at, torch=torch)
    exact = facts.holds(lambda v: is_integral(v.R))
    alone = found.inner is found.tree.leaves[0][0].node
    dense.flows = dense.flows and not exact and not alone
    edits = [*dense.edits, *imports, *dense.elsewhere(found.inner)]
    text = _reduced(dense, facts, found, torch, _inner(dense, found, source))
    edits.append(instead(source, match.node, text))
    check_comments(source, edits)
    return Writing(
        for_kinds_seen(match, facts, edits),
        equivalence="BITWISE" if exact and not found.tree.rounded else None,
    )


def _read(node: ast.Call, source: Source) -> _Reduction | None:
    shape = _of_loss(node, source) or _of_call(node, source)
    if shape is None:
        return None
    inner, kind, rows, loss = shape
    names = named_values(source, node)
    tree = read_tree(inner, source, names, reduced=loss)
    if tree is None:
        return None
    leaves = {id(leaf.node) for leaf, _ in tree.leaves}
    named = tuple(
        one for one in names.values() if any(id(part) in leaves for part in ast.walk(one.value))
    )
    return _Reduction(inner, kind, rows, loss, named, tree)


def _of_loss(node: ast.Call, source: Source) -> tuple[ast.expr, str, bool, bool] | None:
    name = source.dotted(node.func) or ""
    last = name.removeprefix(_FUNCTIONAL)
    if last not in LOSSES or len(node.args) > 2 + last.startswith("binary"):
        return None
    words = {word.arg: word.value for word in node.keywords}
    reduction = words.get("reduction", ast.Constant("mean"))
    if not isinstance(reduction, ast.Constant) or reduction.value not in ("mean", "sum"):
        return None
    return node, str(reduction.value), False, True


def _of_call(node: ast.Call, source: Source) -> tuple[ast.expr, str, bool, bool] | None:
    """`T.sum()`, `torch.sum(T)`, and both over the first dimension alone."""
    dotted = source.dotted(node.func)
    if dotted is not None:
        kind, given = dotted.removeprefix("torch."), node.args
    elif isinstance(node.func, ast.Attribute):
        kind, given = node.func.attr, [node.func.value, *node.args]
    else:
        return None
    dims = [word.value for word in node.keywords if word.arg in ("dim", "axis")] + given[1:]
    if kind not in _FILLS or not given or len(node.keywords) + len(given) - 1 != len(dims):
        return None
    if len(dims) > 1 or not all(isinstance(one, ast.Constant) and one.value == 0 for one in dims):
        return None
    if any(isinstance(one, ast.Constant) and isinstance(one.value, bool) for one in dims):
        return None
    return given[0], kind, bool(dims), False


def _need(match: Match, facts: Facts, found: _Reduction) -> None:
    need_fit(facts, found.tree, match.source)
    if found.kind == "mean":
        facts.need("the mean is one of floating numbers", lambda v: is_floating(v.R))


def _inner(dense: Dense, found: _Reduction, source: Source) -> str:
    """The reduced expression, over all elements."""
    if not found.loss:
        return dense.text(found.inner)
    assert isinstance(found.inner, ast.Call)
    words = {word.arg: word for word in found.inner.keywords}
    if "reduction" in words:
        return dense.text(found.inner, {words["reduction"]: 'reduction="none"'})
    last = max([*found.inner.args, *found.inner.keywords], key=source.start)
    return dense.text(found.inner, after=(last, ', reduction="none"'))


def _reduced(dense: Dense, facts: Facts, found: _Reduction, torch: str, inner: str) -> str:
    """The reduction of what is left of the inner text where nothing is selected."""
    of_truths = facts.holds(lambda v: v.R.dtype == "bool")
    fill = "False" if of_truths and _FILLS[found.kind] == "0" else _FILLS[found.kind]
    kept = dense.kept(inner, fill)
    dims = _dims(facts) if found.rows else ""
    if found.kind != "mean":
        return f"{kept}.{found.kind}({dims})"
    if dense.behind and not found.rows:
        behind = [str(-1 - n) for n in range(dense.behind)]
        kept += f".mean({behind[0]})" if len(behind) == 1 else f".mean(({', '.join(behind)}))"
    dtype = facts.only(_ONE_TYPE, lambda v: v.R.dtype, "")
    if dtype not in _HALVES:
        return f"{kept}.sum({dims}) / {dense.mask}.sum()"
    dims = f"{dims}, " if dims else ""
    return f"({kept}.sum({dims}dtype={torch}.float32) / {dense.mask}.sum()).to({torch}.{dtype})"


def _dims(facts: Facts) -> str:
    """The dimensions of the mask, of which the selection made one."""
    rank = facts.only(_ONE_SHAPE, lambda v: len(v.M.shape), 1)
    return "0" if rank == 1 else f"({', '.join(map(str, range(rank)))})"


FIX = Fix(codes=("TT102",), equivalence="ROUNDING", find=find, write=write)
