"""The constants of a machine that a replay needs, measured in the trace itself. Microseconds."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from statistics import fmean, median

from torchtrim.traces.launches import Schedule, Work

_NEAR_US = 200.0
_IDLE_US = 2.0
_FEWEST = 3
_LAUNCH_US, _GAP_US, _BACK_US = 5.0, 1.5, 5.0


@dataclass(kw_only=True, slots=True)
class Latencies:
    """`launch`: from the call to the start on an idle stream. `gap`: between two activities of a stream.

    `cost`: what a call that launches keeps the host. `back`: from the end of the awaited work to the wait's
    return. `least`: what a waiting call costs that need not wait. The first three by the activity's kind,
    the others by the wait's.
    """

    launch: dict[str, float]
    gap: dict[str, float]
    cost: dict[str, float]
    back: dict[str, float] = field(default_factory=dict)
    least: dict[str, float] = field(default_factory=dict)

    def launch_of(self, work: Work) -> float:
        """From the beginning of the call to the activity's start on an idle stream."""
        return self.launch.get(work.kind, self.launch.get("", _LAUNCH_US))

    def gap_of(self, work: Work) -> float:
        """From the end of the activity before it on a busy stream to its start."""
        return self.gap.get(work.kind, self.gap.get("", _GAP_US))

    def cost_of(self, work: Work) -> float:
        """What the call that launches it keeps the host."""
        return self.cost.get(work.kind, self.cost.get("", _LAUNCH_US))

    def back_of(self, kind: str) -> float:
        """From the end of the awaited work to the return of the call."""
        return self.back.get(kind, _BACK_US)

    def least_of(self, kind: str) -> float:
        """What the call costs where the work is done already."""
        return self.least.get(kind, _LAUNCH_US)


def measure(plan: Schedule) -> Latencies:
    """The latencies of the machine on which the trace was recorded."""
    launch: dict[str, list[float]] = defaultdict(list)
    gap: dict[str, list[float]] = defaultdict(list)
    cost: dict[str, list[float]] = defaultdict(list)
    for work in plan.works:
        call = work.call
        if call is None:
            continue
        cost[work.kind].append(call.dur)
        free = work.before.event.end if work.before is not None else 0.0
        since, idle = work.event.ts - call.ts, work.event.ts - free
        if free + _IDLE_US < call.ts:
            if 0 <= since < _NEAR_US:
                launch[work.kind].append(since)
        elif since > 2 * _LAUNCH_US and -_IDLE_US < idle < _NEAR_US:
            gap[work.kind].append(max(idle, 0.0))
    return Latencies(
        launch=_summary(launch, median),
        gap=_summary(gap, _trimmed),
        cost=_summary(cost, median),
    )


def _summary(samples: dict[str, list[float]], figure: object) -> dict[str, float]:
    assert callable(figure)
    found = {kind: figure(values) for kind, values in samples.items() if len(values) >= _FEWEST}
    every = [value for values in samples.values() for value in values]
    return found | ({"": figure(every)} if every else {})


def _trimmed(values: Iterable[float]) -> float:
    """The mean without the highest tenth: many small gaps add up, and outliers have other reasons."""
    ordered = sorted(values)
    return fmean(ordered[: max(1, len(ordered) * 9 // 10)])
