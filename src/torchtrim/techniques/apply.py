"""Applies a whole plan to live modules, all of it or nothing."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from torchtrim.errors import ApplyFailed, TorchtrimError
from torchtrim.records.plan import Plan
from torchtrim.techniques.base import Handles, technique


class Applied(Handles):
    """A plan that was applied. `revert` makes the modules what they were."""


def apply_plan(plan: Plan, roots: Mapping[str, nn.Module]) -> Applied:
    """Apply every technique to these roots. Raises `ApplyFailed` with the roots as they were.

    Places of roots that are not among these are left for when those appear.
    """
    applied = Applied()
    try:
        for chosen in plan.techniques:
            where = tuple(w for w in chosen.where if w.split(".")[0].split("[")[0] in roots)
            if where:
                part = type(chosen)(
                    name=chosen.name,
                    where=where,
                    options=chosen.options,
                    equivalence=chosen.equivalence,
                )
                applied.add(technique(chosen.name).apply(roots, part))
    except TorchtrimError:
        applied.revert()
        raise
    except Exception as error:
        applied.revert()
        raise ApplyFailed(
            f"the plan could not be applied, and the model is as it was: {error}"
        ) from error
    return applied
