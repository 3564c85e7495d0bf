"""What each technique would reach of a step's peak, alone; of a job of several ranks, sharding too."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress

from torchtrim.core.isolation import isolated
from torchtrim.errors import TorchtrimError
from torchtrim.executor.registry import Measured, names, refusals_of, technique
from torchtrim.planner.planner import Planner
from torchtrim.planner.variants import Planners
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
from torchtrim.workflows.estimate import Estimate
from torchtrim.workflows.optimize.trials import choices

# A plan or a lever that saves less of the peak is none.
LEAST_SAVING = 0.005
_RANK = EQUIVALENCES.index


SHARD = "shard"
_EQUIVALENCE: Equivalence = "ROUNDING"


class Reached:
    """What the plan that needs least was measured to need; `used` is its figure of that kind of memory."""

    def __init__(self, techniques: Sequence[Technique], used: int, seconds: float) -> None:
        self.names = tuple(dict.fromkeys(one.name for one in techniques))
        self.lever = Lever(
            technique=" + ".join(self.names),
            equivalence=_least([one.equivalence for one in techniques]),
            peak_bytes=used,
            step_seconds=seconds,
            source="measured",
        )


def levers_of(
    planner_of: Callable[[str], Planner | Planners],
    whole: Budget,
    reached: Reached,
    exclude: Collection[str],
    allow: Allowance,
    known: Callable[[Plan], int | None],
) -> tuple[Lever, ...]:
    """The smallest peak of each technique that lowers it, and of those of the plan together: quickest first.

    `planner_of` plans with one technique alone, and one that it cannot plan is left out; `whole` is the
    original's own figure. `known` is what a plan was measured to need, None for one that was not run.
    """
    found = [reached.lever] if reached.names else []
    for name in names():
        if name in exclude or reached.names == (name,):
            continue
        with isolated("technique", name), suppress(TorchtrimError):
            planner = planner_of(name)
            bias = whole.bytes - planner.simulated_original
            plan = planner.floor_plan(Budget(0, whole.kind, bias))
            lever = _lever(name, plan, allow, known(plan))
            used = name in {one.name for one in plan.techniques}
            if used and lever.peak_bytes < (1 - LEAST_SAVING) * whole.bytes:
                found.append(lever)
    return tuple(sorted(found, key=lambda lever: lever.step_seconds))


def refusals(original: Trial, exclude: Collection[str]) -> tuple[str, ...]:
    """What techniques say of the places at which they would save and are not used."""
    assert original.profile is not None
    step = step_of(original.profile, original.seconds)
    known = (name for name in names() if name not in exclude)
    return tuple(said for name in known for said in refusals_of(name, step))


def _lever(name: str, plan: Plan, allow: Allowance, measured: int | None) -> Lever:
    """What a plan with one technique reaches, as it was measured if it was."""
    equivalence = _least([one.equivalence for one in plan.techniques])
    used = tuple(dict.fromkeys(one.name for one in plan.techniques))
    several = len(used) > 1
    ran = measured is not None or (isinstance(technique(name), Measured) and not several)
    return Lever(
        technique=" + ".join(used) if several else name,
        equivalence=equivalence,
        needs="" if allow.holds(equivalence, name) else words_for(equivalence, name),
        peak_bytes=plan.predicted.peak_bytes if measured is None else measured,
        step_seconds=plan.predicted.step_seconds,
        source="measured" if ran else "simulated",
    )


def _least(equivalences: Sequence[Equivalence]) -> Equivalence:
    """The least equal of several."""
    return max(equivalences, key=_RANK, default="BITWISE")


def may_shard(original: Trial, allowed: Allowance, exclude: Collection[str]) -> bool:
    """Whether it is a job whose ranks each hold a whole model, and `shard` may split it."""
    if SHARD in exclude or not original.ranks:
        return False
    return bool(choices(original, (SHARD,), (), allowed))


def with_shard(
    levers: tuple[Lever, ...], workload: Workload, original: Trial, whole: int
) -> tuple[Lever, ...]:
    """The levers, and what sharding alone would need where none of them says so."""
    if any(one.technique == SHARD for one in levers):
        return levers
    return levers + sharded_lever(workload, original, whole)


def sharded_lever(workload: Workload, original: Trial, whole: int) -> tuple[Lever, ...]:
    """What FSDP2 would need on each rank of a job with `DistributedDataParallel`, from a dry run of one.

    None where there is no such job, where the dry run fails, or where it would save nothing of `whole`
    bytes. The ranks' sums are added in another order: equal up to rounding.
    """
    profile = original.profile
    if not isinstance(workload, Script) or profile is None or not profile.replicas:
        return ()
    ranks = len(original.ranks)
    if ranks < 2:
        return ()
    request = Request(steps=0, dry=True, ranks=ranks, sharding=Sharding())
    alone = workload._replace(processes=1, only=-1)
    try:
        found = Estimate(alone, device=alone.device, request=request)
    except TorchtrimError:
        return ()
    if found.peak_bytes >= whole:
        return ()
    return (
        Lever(
            technique=SHARD,
            equivalence=_EQUIVALENCE,
            peak_bytes=found.peak_bytes,
            step_seconds=0.0,
            needs=f"fully_shard in the script: {_command(workload, ranks)}",
            source="simulated",
        ),
    )


def _command(script: Script, ranks: int) -> str:
    """The command that says more."""
    target = ["-m", script.target] if script.module else [path_argument(script.target)]
    device = ["--device", script.device] if script.device else []
    words = ["torchtrim", "estimate", *target, *device, "--ranks", str(ranks), "--fsdp"]
    return shlex.join([*words, *(["--", *script.args] if script.args else [])])
