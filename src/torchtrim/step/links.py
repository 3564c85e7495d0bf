"""Trips to the host over one link: when each copy runs, the work that hides it, and the stalls.

There is one lane in each direction. A copy begins when the copies queued before it on its lane are done, and
a tensor is copied back only after it has been copied out. While compute awaits a copy, the step pauses but
the link does not. Since a stall delays all later tasks, `traffic` steps through the tasks itself instead of
using `step.lanes`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal, NamedTuple

from torchtrim.step.edits import Edit, Trip
from torchtrim.step.lanes import LaneTask, run_lanes
from torchtrim.step.step import Step

Way = Literal["out", "home"]


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
    """Return when the trips of edits run, in the step with these edits."""
    return _LinkSimulation(step, edits).run()


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


_WORK, _OUT, _GONE, _BACK, _ASKED = range(5)


class _LinkSimulation:
    """Steps through the events of a step: work is inserted, a copy is queued, or a copy is awaited.

    Order within a task: its inserted work, then copies out that are queued, copies out that are awaited, and
    the same for copies back.
    """

    def __init__(self, step: Step, edits: Sequence[Edit]) -> None:
        self._clock = step.clock
        self._trips = tuple(trip for edit in edits for trip in edit.trips)
        self._inserts = [insert for edit in edits for insert in edit.inserts]
        self._free: dict[Way, float] = {"out": 0.0, "home": 0.0}
        self._copies: dict[tuple[int, Way], LinkCopy] = {}
        self._delays: list[tuple[int, float]] = []
        self._delay = 0.0

    def run(self) -> Traffic:
        for task, kind, number in self._moments():
            if kind == _WORK:
                self._later(task, self._inserts[number].seconds)
            elif kind in (_OUT, _BACK):
                self._queue(task, number, "out" if kind == _OUT else "home")
            else:
                self._await(task, number, "out" if kind == _GONE else "home")
        copies = sorted(self._copies.values(), key=lambda copy: (copy.start, copy.trip))
        return Traffic(self._trips, tuple(copies), tuple(self._delays))

    def _moments(self) -> list[tuple[int, int, int]]:
        last = len(self._clock) - 1
        moments = [(insert.at, _WORK, number) for number, insert in enumerate(self._inserts)]
        for number, trip in enumerate(self._trips):
            moments += [
                (trip.leaves, _OUT, number),
                (trip.gone, _GONE, number),
                (trip.back, _BACK, number),
                (trip.asked, _ASKED, number),
            ]
        return sorted((min(task, last), kind, number) for task, kind, number in moments)

    def _queue(self, task: int, number: int, way: Way) -> None:
        self._later(task, self._trips[number].queueing)
        out = self._copies.get((number, "out"))
        earliest = max(self._now(task), out.end if out is not None else 0.0)
        start = max(self._free[way], earliest)
        end = self._free[way] = start + self._trips[number].seconds
        self._copies[number, way] = LinkCopy(number, way, start, end, 0.0)

    def _await(self, task: int, number: int, way: Way) -> None:
        copy = self._copies[number, way]
        stall = max(copy.end - self._now(task), 0.0)
        self._copies[number, way] = copy._replace(stall=stall)
        self._later(task, stall)

    def _now(self, task: int) -> float:
        return self._clock[task] + self._delay

    def _later(self, task: int, seconds: float) -> None:
        if seconds > 0.0:
            self._delay += seconds
            self._delays.append((task, self._delay))
