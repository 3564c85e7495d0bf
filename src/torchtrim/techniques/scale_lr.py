"""Scale LR: an optimizer's learning rate follows a changed batch size.

A larger batch gives a less noisy gradient, so steps may be longer, and fewer of them must go as far. With
`rule = "linear"` the rate is multiplied by `to_batch / from_batch` (Goyal et al. 2017, for SGD), with `rule =
"sqrt"` by its square root (Krizhevsky 2014; for Adam and similar, Malladi et al. 2022). Linear scaling is
known to fail in the first steps, when weights change quickly, and beyond a batch size that depends on the
data. With `warmup` the factor rises from 1 over that many steps: a few hundred, or up to five epochs.

The factor applies while `step` runs, to the current rates of the groups: schedulers of any kind continue
unchanged, and groups, `state_dict` and logs show the rate that the script has set. Warm-up counts the steps
of this run; a run resumed from a checkpoint warms up again, unless `warmup = 0`.

It saves nothing, and no plan for a budget uses it: `torchtrim plan SCRIPT --find-batch --allow
semantic=scale_lr` writes a plan with it for the batch size found. The step computes a different function, and
the certificate says AS ASKED. `where` names optimizers.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from torchtrim.executor.places import optimizer_at, wrong_options
from torchtrim.executor.registry import Handle, MeasuredTechnique, Option, Roots, all_or_none
from torchtrim.records.plan import Technique
from torchtrim.records.profile import Profile
from torchtrim.step.step import Step

WARMUP = 300
"""Arbitrary; steps of warm-up in plans that raise the rate, "a few hundred" as above."""
_RULES = ("linear", "sqrt")
_LINEAR = ("SGD", "ASGD")


class ScaleLr(MeasuredTechnique):
    """`where` names optimizers. `rule`: `linear` or `sqrt`; `warmup`: steps until the factor is reached."""

    name = "scale_lr"
    does = "scale the learning rate with the batch"
    takes = ("from_batch", "to_batch", "rule", "warmup")
    equivalence = "SEMANTIC"
    assumes = ("no step hook changes the learning rate",)
    ways = 0

    def options(self, step: Step) -> Sequence[Option]:
        """Return no options: it saves nothing."""
        return ()

    def apply(self, roots: Roots, technique: Technique) -> Handle:
        """Give the optimizers a `step` with the scaled rate. Raises `ApplyFailed`."""
        from torchtrim.executor.stepping import Stepping, run_scaled

        factor, warmup = settings_of(technique)

        def scaled(where: str) -> Stepping:
            around = run_scaled(factor, warmup)
            return Stepping(where, optimizer_at(roots, where), around, closures=True)

        return all_or_none(technique.where, scaled)

    def by_hand(self, roots: Roots, technique: Technique) -> Handle:
        """Register hooks before and after `step` that multiply the rate and restore it."""
        from torchtrim.executor.stepping import scaled_by_hand

        factor, warmup = settings_of(technique)
        return all_or_none(
            technique.where,
            lambda where: scaled_by_hand(optimizer_at(roots, where), factor, warmup),
        )

    def bars(self, technique: Technique) -> Collection[str]:
        """Return the technique that updates before `step` is called."""
        return ("optimizer_in_backward",)

    def advice(self, technique: Technique) -> str:
        """Return what to check."""
        return "a larger batch means fewer steps per epoch: step-based schedules end earlier in the data"


TECHNIQUE = ScaleLr()


def lr_techniques(profile: Profile, now: int, wanted: int) -> tuple[Technique, ...]:
    """Return the techniques for another batch size, one for each rule that the optimizers need."""
    kinds = {one.optimizer: one.type.rpartition(".")[2] for one in profile.optimizer_steps}
    warmup = WARMUP if wanted > now else 0
    places = {
        rule: [name for name, kind in kinds.items() if (kind in _LINEAR) is (rule == "linear")]
        for rule in _RULES
    }
    return tuple(
        Technique(
            name=TECHNIQUE.name,
            where=tuple(where),
            options={"from_batch": now, "to_batch": wanted, "rule": rule, "warmup": warmup},
            equivalence="SEMANTIC",
        )
        for rule, where in places.items()
        if where
    )


def settings_of(technique: Technique) -> tuple[float, int]:
    """Return the factor, and the number of warm-up steps. Raises `ApplyFailed`."""
    options = technique.options
    now, wanted = options.get("from_batch"), options.get("to_batch")
    rule, warmup = options.get("rule"), options.get("warmup", 0)
    if (
        not (type(now) is int and now > 0 and type(wanted) is int and wanted > 0)
        or rule not in _RULES
        or type(warmup) is not int
        or warmup < 0
    ):
        sizes = "the options `from_batch` and `to_batch`, 1 or more"
        takes = f"`rule`, one of {', '.join(_RULES)}, and `warmup`, 0 or more steps"
        raise wrong_options(technique, f"{sizes}, {takes}")
    ratio = wanted / now
    return (ratio if rule == "linear" else ratio**0.5), warmup
