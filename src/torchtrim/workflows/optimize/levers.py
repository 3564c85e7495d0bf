"""Levers: the peak that each technique would reach alone, and sharding in a job of several ranks."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from typing import NamedTuple

from torchtrim.core.isolation import isolated
from torchtrim.core.units import format_apart, format_bytes
from torchtrim.errors import TorchtrimError
from torchtrim.executor.registry import MeasuredTechnique, names, refusals_of, technique
from torchtrim.records.budget import Budget
from torchtrim.records.commands import path_argument
from torchtrim.records.figures import Lever
from torchtrim.records.finding import EQUIVALENCES, Equivalence
from torchtrim.records.plan import Plan, Technique
from torchtrim.records.sharding import Sharding
from torchtrim.records.terms import Allowance, words_for
from torchtrim.records.trial import Request, Trial
from torchtrim.runner.script import Script
from torchtrim.runner.trials import Workload
from torchtrim.step.from_profile import step_of
from torchtrim.step.simulate import simulate
from torchtrim.step.step import DEVICE
from torchtrim.workflows.estimate import Estimate
from torchtrim.workflows.optimize.trials import choices

LEAST_SAVING = 0.005  # of the peak; a smaller saving is within the noise of an allocator
_RANK = EQUIVALENCES.index


SHARD = "shard"
_STAYS = ("parameter", "buffer", "input")


class FoundPlan(NamedTuple):
    """A plan, and if it was run its figure of the budget's kind of memory and its step time."""

    plan: Plan
    used: int | None
    seconds: float = 0.0


def out_of_reach(original: Trial, budget: Budget) -> str:
    """Return why no plan for one process is expected to meet a budget, or an empty string.

    What graphs of earlier steps keep counts as an input, though recomputation there would free it.
    """
    if original.profile is None or original.ranks or budget.kind != "allocated":
        return ""
    step, held = step_of(original.profile, original.seconds), dict.fromkeys(_STAYS, 0)
    peak = simulate(step).task
    for tensor in step.tensors:
        saved = {place for place, hold in enumerate(tensor.holds) if hold.saver >= 0}
        if (
            tensor.kind in held
            and tensor.pool == DEVICE
            and tensor.birth < peak < tensor.end(saved)
        ):
            held[tensor.kind] += tensor.bytes
    if (total := sum(held.values())) <= budget.bytes:
        return ""
    parts = ", ".join(f"{kind}s {format_bytes(size)}" for kind, size in held.items() if size)
    asked, kept = format_apart(budget.bytes, total)
    return (
        f"no plan is expected to meet {asked}: {kept} are there before the step and at its peak ({parts}); "
        "looking for the smallest peak instead"
    )


def reached(techniques: Sequence[Technique], used: int, seconds: float) -> Lever:
    """Return the lever of a measured plan; `used` is its figure of the budget's kind of memory."""
    return Lever(
        technique=" + ".join(dict.fromkeys(one.name for one in techniques)),
        equivalence=_least([one.equivalence for one in techniques]),
        peak_bytes=used,
        step_seconds=seconds,
        source="measured",
    )


def levers_of(
    floor_of: Callable[[str], FoundPlan],
    whole: int,
    lowest: Lever,
    exclude: Collection[str],
    allow: Allowance,
) -> tuple[Lever, ...]:
    """Return the smallest peak of each technique that lowers the peak, quickest first.

    `floor_of` returns the plan of one technique alone that needs least, or raises. `whole`: the original's
    own figure; `lowest`: the lever of the plan that needs least.
    """
    found = [lowest] if lowest.technique else []
    for name in names():
        if name in exclude or name == lowest.technique:
            continue
        with isolated("technique", name), suppress(TorchtrimError):
            found_plan = floor_of(name)
            lever = _lever(name, found_plan, allow)
            used = name in {one.name for one in found_plan.plan.techniques}
            if used and lever.peak_bytes < (1 - LEAST_SAVING) * whole:
                found.append(lever)
    return tuple(sorted(found, key=lambda lever: lever.step_seconds))


def rounded(
    fitting: Callable[[], FoundPlan], budget: Budget, known: Collection[Lever], allow: Allowance
) -> tuple[Lever, ...]:
    """Return the lever of all techniques that may round, together, if only they meet a budget.

    `fitting` returns their plan for it, or raises.
    """
    if any(one.equivalence == "ROUNDING" and one.peak_bytes <= budget.bytes for one in known):
        return ()
    with isolated("technique", "rounding together"), suppress(TorchtrimError):
        return (_lever("", fitting(), allow),)
    return ()


def refusals(original: Trial, exclude: Collection[str]) -> tuple[str, ...]:
    """Return the techniques' reasons for places they would save at but cannot."""
    assert original.profile is not None
    step = step_of(original.profile, original.seconds)
    known = (name for name in names() if name not in exclude)
    return tuple(said for name in known for said in refusals_of(name, step))


def _lever(name: str, found: FoundPlan, allow: Allowance) -> Lever:
    plan, measured, seconds = found
    equivalence = _least([one.equivalence for one in plan.techniques])
    used = tuple(dict.fromkeys(one.name for one in plan.techniques))
    alone = technique(used[0]) if len(used) == 1 else None
    ran = measured is not None or isinstance(alone, MeasuredTechnique)
    return Lever(
        technique=" + ".join(used) or name,
        equivalence=equivalence,
        needs="" if allow.holds(equivalence, name) else words_for(equivalence, name),
        peak_bytes=plan.predicted.peak_bytes if measured is None else measured,
        step_seconds=seconds or plan.predicted.step_seconds,
        source="measured" if ran else "simulated",
    )


def _least(equivalences: Sequence[Equivalence]) -> Equivalence:
    return max(equivalences, key=_RANK, default="BITWISE")


def may_shard(original: Trial, allowed: Allowance, exclude: Collection[str]) -> bool:
    """Return True for a job whose ranks each hold a whole model that `shard` may split."""
    if SHARD in exclude or not original.ranks:
        return False
    return bool(choices(original, (SHARD,), (), allowed))


def with_shard(
    levers: tuple[Lever, ...], workload: Workload, original: Trial, whole: int
) -> tuple[Lever, ...]:
    """Add the lever of sharding alone, if the levers lack it."""
    if any(one.technique == SHARD for one in levers):
        return levers
    return levers + sharded_lever(workload, original, whole)


def sharded_lever(workload: Workload, original: Trial, whole: int) -> tuple[Lever, ...]:
    """Return the lever of FSDP2 on each rank of a job with `DistributedDataParallel`, by a dry run.

    Empty for other jobs, if the dry run fails, or if sharding needs at least `whole` bytes.
    """
    profile, ranks = original.profile, len(original.ranks)
    if not isinstance(workload, Script) or profile is None or not profile.replicas or ranks < 2:
        return ()
    request = Request(steps=0, dry=True, ranks=ranks, sharding=Sharding())
    alone = workload._replace(processes=1, only=-1)
    try:
        peak = Estimate(alone, device=alone.device, request=request).peak_bytes
    except TorchtrimError:
        return ()
    lever = Lever(
        technique=SHARD,
        equivalence="ROUNDING",  # the ranks' sums are added in another order
        peak_bytes=peak,
        step_seconds=0.0,
        needs=f"fully_shard in the script: {_command(workload, ranks)}",
        source="simulated",
    )
    return (lever,) if peak < whole else ()


def _command(script: Script, ranks: int) -> str:
    target = ["-m", script.target] if script.module else [path_argument(script.target)]
    device = ["--device", script.device] if script.device else []
    words = ["torchtrim", "estimate", *target, *device, "--ranks", str(ranks), "--fsdp"]
    return shlex.join([*words, *(["--", *script.args] if script.args else [])])
