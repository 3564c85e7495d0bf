"""Spreads a model over many devices, from a dry run of one step of it on one of them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

from torchtrim.core.units import parse_bytes
from torchtrim.costs.devices import DEVICES
from torchtrim.costs.roofline import estimate
from torchtrim.errors import UsageError
from torchtrim.pipelines.orders import order_of
from torchtrim.planner.stages.chain import ChainReader
from torchtrim.planner.stages.spread import FABRIC, Fabric, RankLayout, Spread, spread
from torchtrim.records.trial import Request
from torchtrim.runner.trials import Model, Progress, Workload
from torchtrim.workflows.estimate.estimate import Estimate


def spread_over(
    workload: Workload | Callable[[], Model],
    devices: int,
    *,
    memory: str | int,
    batch: int,
    device: str = "h100",
    fabric: Fabric = FABRIC,
    layouts: Sequence[RankLayout] = (),
    progress: Progress = lambda _: None,
) -> tuple[Spread, ...]:
    """Stages x replicas x shards for a step of `batch` samples on so many devices, the quickest first.

    The workload runs dry once, with the few samples that it has; nothing is computed, and nothing is
    allocated for a function that makes it. Seconds are the device's at its full rates (`costs.devices`),
    so a real step takes longer: the order of layouts is what they are for. Raises `InfeasibleBudget`,
    `Unsupported`, `UsageError`.
    """
    if device not in DEVICES:
        raise UsageError(
            f"there is no device {device!r} to plan for; there are {', '.join(DEVICES)}."
        )
    if devices < 1 or batch < 1:
        raise UsageError(f"{batch} samples on {devices} devices: there is at least one of each.")
    budget = parse_bytes(memory)
    request = Request(steps=0, warmup=1, dry=True)
    found = Estimate(workload, device=device, request=request, progress=progress)
    times = estimate(found.profile, DEVICES[device]).device_seconds
    reader = ChainReader(found.profile, 0.0, times)
    progress("looking for stages, replicas and shards")
    chain_of = functools.lru_cache(maxsize=None)(reader.chain)
    return spread(chain_of, devices, batch, budget, order_of, fabric, layouts)
