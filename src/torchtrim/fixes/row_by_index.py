"""`table[t.item()]`, and `table[t]` with a tensor of zero dimensions, become `table[t.view(1)][0]`.

An index of zero dimensions is a number to PyTorch, which the host reads, with or without `.item()`. One of
one dimension stays on the device. So `alphas_cumprod[t]` in a sampler's loop does not wait.

Its values are the same; in memory they may lie in another order, in which a sum rounds in another way.

Ranks and types that were seen are tested for; for others the original is kept. Without a run the source has
to say that the one is a tensor, and the other a tensor of integers that has no dimensions or is read here.

Never applied without being asked for: an index out of bounds is an error of the device then, which ends the
process's use of it. Refused where what is read may be written to: a row is a view, this is a copy.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

from torchtrim.rewriter.fix import Fix, Match, Writing
from torchtrim.rewriter.guarded import for_kinds_seen
from torchtrim.rewriter.replace import replace
from torchtrim.source.facts import Facts, Refused, Values, is_tensor
from torchtrim.source.forms import match_form
from torchtrim.source.names import only_reads_at
from torchtrim.source.source import Source

_FORMS = ("X[I.item()]", "X[int(I)]", "X[I]")
_RISK = (
    "an index out of bounds is an error of the device, after which the process can use it no more"
)


def find(source: Source) -> Iterator[Match]:
    """What is read at one place."""
    for node in source.nodes:
        if not isinstance(node, ast.Subscript) or not isinstance(node.ctx, ast.Load):
            continue
        if isinstance(node.slice, ast.Constant | ast.Slice | ast.Tuple | ast.UnaryOp | ast.List):
            continue
        found = ((form, match_form(form, node, source)) for form in _FORMS)
        form, bound = next((one for one in found if one[1] is not None), ("", None))
        if bound is not None:
            at = (node.slice,)
            yield Match(fix=FIX, source=source, node=node, parts=bound.parts, form=form, syncs=at)


def write(match: Match, facts: Facts) -> Writing:
    """The row by an index of one dimension."""
    facts.need(
        f"`{match.text('I')[:60]}` is one 64-bit integer on the device of `{match.text('X')[:60]}`, a tensor",
        _fits,
        told=lambda v: _is_told(v, read=match.form != "X[I]", cast="int(" in match.form),
    )
    if not only_reads_at(match.source, match.node):
        raise Refused("it may be written to, and is a view of the whole. Use `.clone()`")
    edits = replace(match, "X[I.view(1)][0]")
    return Writing(for_kinds_seen(match, facts, edits), risk=_RISK)


def _fits(values: Values) -> bool:
    table, index = values.X, values.I
    there = is_tensor(table, index) and index.device == table.device
    return there and index.dtype == "int64" and not index.shape and bool(table.shape)


def _is_told(values: Values, *, read: bool, cast: bool) -> bool:
    """Whether the source says enough: what is read has one number, and what no `int` makes whole is."""
    index = values.I
    whole = (read and not cast) or index.dtype.startswith("int")
    return is_tensor(values.X, index) and whole and (read or not index.shape)


FIX: Fix = Fix(codes=("TT101",), equivalence="ROUNDING", find=find, write=write)
