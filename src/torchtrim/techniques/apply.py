"""Applies a whole plan to live modules, all of it or nothing."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

import torch
from torch import nn

from torchtrim.errors import ApplyFailed, TorchtrimError
from torchtrim.observe.optimizers import names_of
from torchtrim.records.plan import Plan
from torchtrim.techniques.base import Handles, Replaces, technique
from torchtrim.techniques.fingerprint import fingerprint_of
from torchtrim.techniques.places import root_of

if TYPE_CHECKING:
    from torchtrim.techniques.base import Root


class Applied(Handles):
    """A plan that was applied. `revert` makes the modules what they were."""


def apply_to_its_own(plan: Plan, roots: Iterable[Root]) -> Applied:
    """Apply a plan to the roots that it was made for. Raises `ApplyFailed` for others."""
    if plan.pipeline is not None:
        raise ApplyFailed(
            "the plan is a pipeline of several processes, and a live model is in one. Run the script with "
            "torchrun: `torchtrim run SCRIPT --plan PLAN` says how."
        )
    named = named_roots(roots)
    for name, root in named.items():
        if isinstance(root, nn.Module) and plan.fingerprint.get(
            name, fingerprint_of(root)
        ) != fingerprint_of(root):
            raise ApplyFailed(f"the plan was made for another {name}. Plan again for this one.")
    return apply_plan(plan, named)


def named_roots(roots: Iterable[Root]) -> dict[str, Root]:
    """Modules after their class, optimizers as `observe.optimizers` names them."""
    every = list(roots)
    optimizers = [root for root in every if isinstance(root, torch.optim.Optimizer)]
    modules = {type(root).__name__: root for root in every if isinstance(root, nn.Module)}
    return {**modules, **dict(zip(names_of(optimizers), optimizers, strict=True))}


def apply_plan(plan: Plan, roots: Mapping[str, Root], *, by_hand: bool = False) -> Applied:
    """Apply every technique to these roots. Raises `ApplyFailed` with the roots as they were.

    `by_hand`: those that make another function as a person would write that, for comparison. Places of
    roots that are not among these are left for when those appear.
    """
    applied = Applied()
    try:
        for chosen in plan.techniques:
            where = tuple(w for w in chosen.where if root_of(w) in roots)
            if where:
                part = type(chosen)(
                    name=chosen.name,
                    where=where,
                    options=chosen.options,
                    equivalence=chosen.equivalence,
                )
                unit = technique(chosen.name)
                if by_hand and isinstance(unit, Replaces):
                    applied.add(unit.by_hand(roots, part))
                else:
                    applied.add(unit.apply(roots, part))
    except TorchtrimError:
        applied.revert()
        raise
    except Exception as error:
        applied.revert()
        raise ApplyFailed(
            f"the plan could not be applied, and the model is as it was: {error}"
        ) from error
    return applied


def shards(plan: Plan | None) -> bool:
    """Whether a plan leaves each rank a part of what the original has whole."""
    return plan is not None and any(one.name == "shard" for one in plan.techniques)
