"""Replace norm: BatchNorm becomes a norm that treats each sample on its own, so that the batch can be split.

BatchNorm in training computes mean and variance over all samples, so parts of the batch give another result,
and small batches a poor one. `to` names the replacement, which keeps the weight and bias of the BatchNorm:

* `group`: `nn.GroupNorm` with as many groups as the greatest common divisor of `groups` (32) and the
  channels.
* `layer`: one group, like LayerNorm over channels and positions. `instance`: a group for each channel.
* `frozen`: the current running statistics, which are no longer updated: `eval()` for the norms only.

Weights are kept, but they were trained with other statistics. A model at the start of its training needs at
most a lower learning rate for the first steps. A trained model must be fine-tuned after `group`, `layer` or
`instance` until its loss is back at its former value; not so after `frozen`, if the statistics fit the data.
Evaluation uses the same norm as training. Modules keep their class, parameters, buffers and `state_dict`;
without torchtrim, a checkpoint loads as BatchNorm, a different function, so write the replacement into the
model once it is decided.

It saves nothing on its own, but makes `micro_batch` possible. The step computes a different function, and the
certificate says AS ASKED. `where` names modules; every BatchNorm inside is replaced.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from torchtrim.executor.places import module_at, wrong_options
from torchtrim.executor.registry import Handle, MeasuredTechnique, Option, Roots, all_or_none
from torchtrim.records.plan import Technique
from torchtrim.step.index import graded_roots
from torchtrim.step.step import Step
from torchtrim.techniques.micro_batch.found import takes_statistics

TO = ("group", "layer", "instance", "frozen")
_GROUPS = 32
"""The default of the GroupNorm paper (Wu and He, 2018)."""


class ReplaceNorm(MeasuredTechnique):
    """`where` names modules. `to`: the replacement; `groups`: the most groups of `group`."""

    name = "replace_norm"
    does = "normalize each sample on its own instead of the batch"
    takes = ("to", "groups")
    equivalence = "SEMANTIC"
    helps: tuple[str, ...] = ("micro_batch",)

    def options(self, step: Step) -> Sequence[Option]:
        """Return each root that computes statistics over the batch, with every replacement."""
        return [
            Option(self.name, where, spans, None, (("to", to),))
            for to in TO
            for where, spans in graded_roots(step, partial(takes_statistics, step)).items()
        ]

    def apply(self, roots: Roots, technique: Technique) -> Handle:
        """Replace the forward of every BatchNorm inside. Raises `ApplyFailed`."""
        from torchtrim.techniques.replace_norm.norms import replaced

        to, groups = _settings(technique)
        return all_or_none(
            technique.where, lambda where: replaced(where, module_at(roots, where), to, groups)
        )

    def by_hand(self, roots: Roots, technique: Technique) -> Handle:
        """Put `nn.GroupNorm` with the same weight and bias in place of each norm, or call `eval()`."""
        from torchtrim.techniques.replace_norm.norms import replaced_by_hand

        to, groups = _settings(technique)
        return all_or_none(
            technique.where, lambda where: replaced_by_hand(module_at(roots, where), to, groups)
        )

    def advice(self, technique: Technique) -> str:
        """Return the fine-tuning it needs."""
        if technique.options.get("to") == "frozen":
            return "statistics are no longer updated: they must fit the data"
        return "a trained model must be fine-tuned until its loss is back at its former value"


TECHNIQUE = ReplaceNorm()


def _settings(technique: Technique) -> tuple[str, int]:
    to, groups = technique.options.get("to"), technique.options.get("groups", _GROUPS)
    if to not in TO or type(groups) is not int or groups < 1:
        takes = f"the options `to`, one of {', '.join(TO)}, and `groups`, 1 or more"
        raise wrong_options(technique, takes)
    return str(to), groups
