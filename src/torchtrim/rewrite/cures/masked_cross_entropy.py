"""`cross_entropy(scores[mask], labels[mask])` becomes a cross entropy that ignores the others.

Selecting by a mask gives as many rows as it has true elements, so the host waits to learn how many,
once for each selection and once more in backward. The rows that are not selected get the label that
`cross_entropy` ignores, and score 0, so that a NaN or infinity in them reaches neither the loss nor a
gradient. The sum is taken in another order: it agrees but for rounding. Where nothing is selected the
mean is NaN in both.

Refused with `reduction="none"`, whose result is as long as the selection, and with labels that are
probabilities.
"""

from __future__ import annotations

import ast

from torchtrim.rewrite.base import Cure, Match, Writing, of_forms
from torchtrim.rewrite.facts import Facts, Refused, Values, is_floating, is_mask
from torchtrim.rewrite.writing import replace

_FORM = "torch.nn.functional.cross_entropy(X[M], Y[M], **REST)"
_LOSS = "cross_entropy({scores}, torch.where(M, Y, -100){rest})"


def write(match: Match, facts: Facts) -> Writing:
    """The same loss over all rows, with those that are not selected ignored."""
    words = {word.arg: word.value for word in match.keywords["REST"]}
    _check_words(words)
    facts.need(
        f"`{match.text('M')}` is a mask of the shape of `{match.text('Y')}`, on the same device",
        lambda v: is_mask(v.M, v.Y) and v.M.shape == v.Y.shape,
    )
    facts.need(
        f"`{match.text('X')}` has one dimension more, of scores", lambda v: _fits(v) and is_floating(v.X)
    )
    facts.need(f"`{match.text('Y')}` holds class numbers", lambda v: v.Y.dtype == "int64")
    ignored = words.get("ignore_index")
    scores = "X.masked_fill(~M.unsqueeze(-1), 0)"
    if not facts.holds(lambda v: len(v.Y.shape) == 1):
        scores += ".movedim(-1, 1)"
    function = match.source.segment(match.node.func)  # type: ignore[attr-defined]
    label = match.source.segment(ignored) if ignored is not None else "-100"
    rest = ", **REST" if words else ""
    text = f"{function}({scores}, torch.where(M, Y, {label}){rest})"
    return Writing(replace(match, text, {"M": "kept"}))


def _check_words(words: dict[str | None, ast.expr]) -> None:
    reduction = words.get("reduction")
    if reduction is not None and (
        not isinstance(reduction, ast.Constant) or reduction.value not in ("mean", "sum")
    ):
        raise Refused("its result would be of another shape; only the mean and the sum are not")
    if "size_average" in words or "reduce" in words:
        raise Refused("it uses `size_average` or `reduce`, which are deprecated; say `reduction`")


def _fits(values: Values) -> bool:
    return values.X.shape[:-1] == values.Y.shape and values.X.device == values.Y.device


CURE: Cure = Cure(
    codes=("TT102",),
    equivalence="ROUNDING",
    find=of_forms(lambda: CURE, _FORM),
    write=write,
)
