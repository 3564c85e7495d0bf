"""Replace norm: BatchNorm becomes a norm that takes each sample by itself, so that the batch can be split.

BatchNorm in training takes mean and variance over all samples, so parts of the batch give another result,
and small batches a poor one. `to` says what takes its place, with the weight and bias of the BatchNorm:

* `group`: `nn.GroupNorm` with as many groups as the greatest common divisor of `groups` (32) and the
  channels.
* `layer`: one group, as LayerNorm over channels and positions. `instance`: a group for each channel.
* `frozen`: the running statistics, as they are, which are no longer updated: `eval()` for the norms alone.

Weights are carried over, what they were trained with is not. A model that begins its training needs nothing
but perhaps a lower learning rate for the first steps. One that is trained already has to be fine-tuned
after `group`, `layer` or `instance` until its loss is what it was, since its activations get another scale;
after `frozen` it need not, but the statistics have to be those of the data. Evaluation uses the same norm
as training. Modules keep their class, parameters, buffers and `state_dict`; a checkpoint loads as BatchNorm
without torchtrim, and is then another function, so write the replacement into the model once it is decided.

It saves nothing by itself: `micro_batch` becomes possible. It is another function, and the certificate says
AS ASKED. `where` names modules; every BatchNorm inside is replaced.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from torchtrim.errors import ApplyFailed
from torchtrim.executor.places import module_at
from torchtrim.executor.registry import Handle, Option, all_or_none
from torchtrim.records.finding import Equivalence
from torchtrim.records.plan import Technique
from torchtrim.step.step import Span, Step
from torchtrim.techniques.micro_batch.found import takes_statistics

TO = ("group", "layer", "instance", "frozen")
_GROUPS = 32


class ReplaceNorm:
    """`where` names modules. `to`: `group`, `layer`, `instance` or `frozen`; `groups`: of `group`, at
    most."""

    name = "replace_norm"
    takes = ("to", "groups")
    equivalence: Equivalence = "SEMANTIC"
    helps: tuple[str, ...] = ("micro_batch",)
    ways = 1

    def options(self, step: Step) -> Sequence[Option]:
        """Each root in which statistics are taken over the batch, with every replacement."""
        return [
            Option(self.name, where, spans, None, (("to", to),))
            for to in TO
            for where, spans in _roots(step).items()
        ]

    def edits(self, step: Step, option: Option) -> None:
        """None: it saves nothing by itself."""

    def apply(self, roots: Mapping[str, Any], technique: Technique) -> Handle:
        """Give every BatchNorm inside another forward. Raises `ApplyFailed`, the model as it was."""
        from torchtrim.techniques.replace_norm.norms import replaced

        to, groups = _settings(technique)
        return all_or_none(
            technique.where, lambda where: replaced(where, module_at(roots, where), to, groups)
        )

    def by_hand(self, roots: Mapping[str, Any], technique: Technique) -> Handle:
        """`nn.GroupNorm` with the same weight and bias in each one's place, or `eval()`."""
        from torchtrim.techniques.replace_norm.norms import replaced_by_hand

        to, groups = _settings(technique)
        return all_or_none(
            technique.where, lambda where: replaced_by_hand(module_at(roots, where), to, groups)
        )

    def bars(self, technique: Technique) -> Collection[str]:
        """Nothing."""
        return ()

    def advice(self, technique: Technique) -> str:
        """What retraining it needs."""
        if technique.options.get("to") == "frozen":
            return "statistics stay as they are: they have to be those of the data"
        return "a model that is trained already has to be fine-tuned until its loss is what it was"


TECHNIQUE = ReplaceNorm()


def _settings(technique: Technique) -> tuple[str, int]:
    to, groups = technique.options.get("to"), technique.options.get("groups", _GROUPS)
    if to not in TO or type(groups) is not int or groups < 1:
        raise ApplyFailed(
            f"replace_norm has the option `to`, one of {', '.join(TO)}, and `groups`, 1 or more, and the "
            f'plan has {technique.options!r}. Write `to = "group"`.'
        )
    return str(to), groups


def _roots(step: Step) -> dict[str, tuple[Span, ...]]:
    found: dict[str, tuple[Span, ...]] = {}
    for call in step.calls:
        module = step.modules[call.module]
        if module.parent < 0 and call.graded and takes_statistics(step, call.span):
            found[module.path] = (*found.get(module.path, ()), call.span)
    return found
