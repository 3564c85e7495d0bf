"""What sharding would reach: the lever of a job whose ranks each hold the whole model."""

from __future__ import annotations

import shlex
from collections.abc import Collection

from torchtrim.errors import TorchtrimError
from torchtrim.records.allowance import Allowance
from torchtrim.records.commands import path_argument
from torchtrim.records.finding import Equivalence
from torchtrim.records.lever import Lever
from torchtrim.records.sharding import Sharding
from torchtrim.records.trial import Request, Trial
from torchtrim.runner.script import Script
from torchtrim.runner.trials import Workload
from torchtrim.workflows.estimate.estimate import Estimate
from torchtrim.workflows.optimize.measured import choices

NAME = "shard"
_EQUIVALENCE: Equivalence = "ROUNDING"


def may_shard(original: Trial, allowed: Allowance, exclude: Collection[str]) -> bool:
    """Whether it is a job whose ranks each hold a whole model, and `shard` may split it."""
    if NAME in exclude or not original.ranks:
        return False
    return bool(choices(original, (NAME,), (), allowed))


def with_shard(
    levers: tuple[Lever, ...], workload: Workload, original: Trial, whole: int
) -> tuple[Lever, ...]:
    """The levers, and what sharding alone would need where none of them says so."""
    if any(one.technique == NAME for one in levers):
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
            technique=NAME,
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
