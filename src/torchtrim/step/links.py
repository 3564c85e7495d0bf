"""Trips to the host over one link: when each copy runs, the work that hides it, and the stalls.

There is one lane in each direction. A copy begins when the copies queued before it on its lane are done, and
a tensor is copied back only after it has been copied out. While compute awaits a copy, the step pauses but
the link does not. Since a stall delays all later tasks, `traffic` steps through the tasks itself instead of
using `step.lanes`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal, NamedTuple

from torchtrim.step.edits import Edit, Insert, Trip
from torchtrim.step.lanes import LaneTask, run_lanes
from torchtrim.step.step import Step

Way = Literal["out", "home"]
_WORK, _OUT, _GONE, _BACK, _ASKED = range(5)


class LinkCopy(NamedTuple):
    """A copy of a trip, in seconds from the start of the step with its edits. Compute pauses for `stall`."""

    trip: int
    way: Way
    start: float
    end: float
    stall: float


class Traffic(NamedTuple):
    """The copies of some edits in the order of their start, and the trips in the order of the edits.

    `delays`: pairs (task, total delay of this task and the following ones, in seconds).
    """

    trips: tuple[Trip, ...]
    copies: tuple[LinkCopy, ...]
    delays: tuple[tuple[int, float], ...]

    @property
    def stall(self) -> float:
        """Seconds that compute spends awaiting copies."""
        return sum(copy.stall for copy in self.copies)


def added_seconds(step: Step, edits: Iterable[Edit]) -> float:
    """Return the seconds that edits add together: their work, and the stalls of their trips on one link."""
    edits = tuple(edits)
    work = sum(edit.work_seconds for edit in edits)
    return work + traffic(step, edits).stall if any(edit.trips for edit in edits) else work


def traffic(step: Step, edits: Sequence[Edit]) -> Traffic:
    """Return when the trips of edits run, in the step with these edits.

    Order within a task: inserted work, copies out queued, copies out awaited, then the same for copies back.
    """
    clock = step.clock
    trips = tuple(trip for edit in edits for trip in edit.trips)
    inserts = [insert for edit in edits for insert in edit.inserts]
    free: dict[Way, float] = {"out": 0.0, "home": 0.0}
    copies: dict[tuple[int, Way], LinkCopy] = {}
    delays: list[tuple[int, float]] = []
    delay = 0.0
    for task, kind, number in _moments(inserts, trips, len(clock) - 1):
        way: Way = "out" if kind in (_OUT, _GONE) else "home"
        if kind == _WORK:
            seconds = inserts[number].seconds
        elif kind in (_OUT, _BACK):
            seconds = trips[number].queueing
        else:
            copy = copies[number, way]
            seconds = max(copy.end - (clock[task] + delay), 0.0)
            copies[number, way] = copy._replace(stall=seconds)
        if seconds > 0.0:
            delay += seconds
            delays.append((task, delay))
        if kind in (_OUT, _BACK):
            out = copies.get((number, "out"))
            start = max(free[way], clock[task] + delay, out.end if out is not None else 0.0)
            end = free[way] = start + trips[number].seconds
            copies[number, way] = LinkCopy(number, way, start, end, 0.0)
    ordered = sorted(copies.values(), key=lambda copy: (copy.start, copy.trip))
    return Traffic(trips, tuple(ordered), tuple(delays))


def _moments(
    inserts: Sequence[Insert], trips: Sequence[Trip], last: int
) -> list[tuple[int, int, int]]:
    moments = [(insert.at, _WORK, number) for number, insert in enumerate(inserts)]
    for number, trip in enumerate(trips):
        moments += [
            (trip.leaves, _OUT, number),
            (trip.gone, _GONE, number),
            (trip.back, _BACK, number),
            (trip.asked, _ASKED, number),
        ]
    return sorted((min(task, last), kind, number) for task, kind, number in moments)


def stall_in_parts(parts: Sequence[float], updates: Sequence[float]) -> float:
    """Return the stall of updates whose state is fetched one part ahead, and copied back after each update.

    `parts`: seconds of each part's copy in one direction. `updates`: seconds of each update. A part is
    fetched only after the part two before it is back on the host, so at most two are on the device.
    """
    home, compute, out = [], [], []
    for n, (part, update) in enumerate(zip(parts, updates, strict=True)):
        two_before = ((("out", n - 2), 0.0), (("update", n - 2), 0.0)) if n > 1 else ()
        one_before = ((("out", n - 1), 0.0),) if n else ()
        home.append(LaneTask(("home", n), part, two_before))
        compute.append(LaneTask(("update", n), update, ((("home", n), 0.0), *one_before)))
        out.append(LaneTask(("out", n), part, ((("update", n), 0.0),)))
    end = max((end for _, end in run_lanes((home, compute, out)).values()), default=0.0)
    return end - sum(updates)
