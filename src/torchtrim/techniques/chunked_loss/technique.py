"""Chunked loss: linear and cross entropy some rows at a time, so that the logits are never there as a whole.

A head gives its logits to `cross_entropy`, and PyTorch then keeps them, their log-softmax and two gradients,
each rows times classes. Here the head's output is only a placeholder. Views, shifts, transposes and casts
of it are done to the hidden states, and `cross_entropy` (or `log_softmax` and `nll_loss`, as function or
module) goes through the rows in chunks: it makes a chunk's logits, its loss and the gradients of hidden
states and weight, and forgets the logits. Backward scales these gradients. Where each row has a gradient of
its own (`reduction="none"`), or in float16, backward makes the logits a second time instead.

Label smoothing, class weights, `ignore_index`, all reductions, a bias, tied weights and autocast are as in
PyTorch, and sums are taken in float32. Where anything else reads the logits (a metric, the model's caller, a
loss of probabilities) they are computed then, and kept from then on; `logsumexp`, of which a z-loss is made,
goes through the chunks too. What is read after the weights have changed is refused, since the logits cannot
be computed any more. Evaluation without gradients runs as it is.

`where` names the linear layer, or the module in whose forward its product is taken. Options: `rows`, how
many at a time; `classes`, which product it is, where the module is no linear layer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torchtrim.errors import ApplyFailed
from torchtrim.executor.places import module_at
from torchtrim.executor.registry import Handle, Handles, Option
from torchtrim.records.finding import Equivalence
from torchtrim.records.plan import Technique
from torchtrim.step.edits import Edit, joined
from torchtrim.step.step import Step
from torchtrim.techniques.chunked_loss.edit import edit_of
from torchtrim.techniques.chunked_loss.found import heads_of

if TYPE_CHECKING:
    from torch import nn

Forward = Callable[..., Any]
_OPTIONS = ("rows", "classes")


class ChunkedLoss:
    """`where` holds the paths of heads: linear layers, or modules that take the product themselves."""

    name = "chunked_loss"
    takes = _OPTIONS
    equivalence: Equivalence = "ROUNDING"

    def options(self, step: Step) -> Sequence[Option]:
        """Every module that makes logits of which nothing but cross entropy reads any."""
        found: dict[str, Option] = {}
        for head in heads_of(step):
            spans = found[head.where].spans if head.where in found else ()
            settings = (("rows", head.rows), ("classes", head.classes))
            found[head.where] = Option(self.name, head.where, (*spans, head.span), None, settings)
        return tuple(found.values())

    def edits(self, step: Step, option: Option) -> Edit | None:
        """The chunks, in place of the tasks that read or make logits."""
        mine = (edit_of(step, head) for head in heads_of(step) if head.where == option.where)
        edits = [edit for edit in mine if edit is not None]
        return joined(edits) if edits else None

    def apply(self, roots: Mapping[str, nn.Module], technique: Technique) -> Handle:
        """Give the named modules outputs that stand for logits. Raises `ApplyFailed`, the model as it was."""
        from torchtrim.techniques.chunked_loss.replace import replaced

        rows, classes = (_number(technique, name) for name in _OPTIONS)
        handles = Handles()
        try:
            for where in technique.where:
                handles.add(replaced(module_at(roots, where), where, rows, classes))
        except BaseException:
            handles.revert()
            raise
        return handles


TECHNIQUE = ChunkedLoss()


def _number(technique: Technique, name: str) -> int:
    unknown = sorted(set(technique.options) - set(_OPTIONS))
    if unknown:
        raise ApplyFailed(
            f"chunked_loss has no option {unknown[0]!r}; it has {', '.join(_OPTIONS)}."
        )
    number = technique.options.get(name, 0)
    if type(number) is not int or number < 0:
        raise ApplyFailed(f"chunked_loss: {name} is a number, 0 to choose one, and not {number!r}.")
    return number
