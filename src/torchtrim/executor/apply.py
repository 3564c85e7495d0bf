"""Applies a whole plan to live modules, all of it or nothing."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

import torch
from msgspec.structs import replace
from torch import nn

from torchtrim.capture.optimizers import names_of
from torchtrim.core.isolation import TO_REPORT, said_of, trace_of
from torchtrim.errors import ApplyFailed, TorchtrimError, UsageError, is_out_of_memory
from torchtrim.executor.failing import defect, note
from torchtrim.executor.fingerprint import fingerprint_of
from torchtrim.executor.places import root_of
from torchtrim.executor.registry import Handle, Handles, Replaces, check_known, technique
from torchtrim.records.plan import Plan, Technique

if TYPE_CHECKING:
    from torchtrim.executor.registry import Root


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
    """Modules after their class, optimizers as `capture.optimizers` names them."""
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
                applied.add(_applied(replace(chosen, where=where), roots, by_hand))
    except Exception:
        applied.revert()
        raise
    return applied


def _applied(one: Technique, roots: Mapping[str, Root], by_hand: bool) -> Handle:
    """Apply one technique. What it raises by mistake becomes an `ApplyFailed` that names it."""
    try:
        unit = technique(one.name)
        check_known(one)
        if by_hand and isinstance(unit, Replaces):
            return unit.by_hand(roots, one)
        return unit.apply(roots, one)
    except UsageError as error:
        raise ApplyFailed(str(error)) from error
    except TorchtrimError:
        raise
    except Exception as error:
        if is_out_of_memory(error):
            raise
        refused = ApplyFailed(
            "the plan could not be applied, and the model is unchanged: "
            f"{one.name} raised {said_of(error)}.\nIf you have edited the plan, look at what it says of "
            f"{one.name}. If not: {TO_REPORT}{trace_of(error)}"
        )
        note(refused, defect(one.name))
        raise refused from error


def shards(plan: Plan | None) -> bool:
    """Whether a plan leaves each rank a part of what the original has whole."""
    return plan is not None and any(one.name == "shard" for one in plan.techniques)
