"""Trips to the host on one link: when each copy runs, what it hides behind, and what waits.

There is one lane in each direction. A copy begins when the copies queued before it on its lane are done, and
a tensor comes back no earlier than it has gone. Where compute awaits a copy the whole step pauses, but
for the link, which goes on: so what one copy is waited for is time that others have.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal, NamedTuple

from torchtrim.step.edits import Edit, Trip
from torchtrim.step.step import Step

Way = Literal["out", "home"]


class Carried(NamedTuple):
    """A copy of a trip, in seconds from the start of the step with its edits.

    `stall`: for how long compute pauses until it is done.
    """

    trip: int
    way: Way
    start: float
    end: float
    stall: float


class Traffic(NamedTuple):
    """The copies of some edits, in the order in which they begin, of trips as the edits have them.

    `delays`: from which task on everything is later, and by how much in all from there on.
    """

    trips: tuple[Trip, ...]
    copies: tuple[Carried, ...]
    delays: tuple[tuple[int, float], ...]

    @property
    def stall(self) -> float:
        """Seconds for which compute awaits copies."""
        return sum(copy.stall for copy in self.copies)


class Lane:
    """One direction of a link, on which copies run in the order in which they are queued."""

    def __init__(self) -> None:
        self.free = 0.0

    def carry(self, seconds: float, earliest: float) -> tuple[float, float]:
        """Queue a copy; when it begins and ends."""
        start = max(self.free, earliest)
        self.free = start + seconds
        return start, self.free


def added_seconds(step: Step, edits: Iterable[Edit]) -> float:
    """What edits add together: their work, and the stalls that their trips on one link cause."""
    edits = tuple(edits)
    work = sum(edit.work_seconds for edit in edits)
    return work + traffic(step, edits).stall if any(edit.trips for edit in edits) else work


def traffic(step: Step, edits: Sequence[Edit]) -> Traffic:
    """When the trips of edits run in the step with these edits."""
    return _Run(step, edits).run()


def stall_in_parts(parts: Sequence[float], updates: Sequence[float]) -> float:
    """Seconds that updates stand still whose parts come home one ahead, and go out as soon as each is done.

    `parts` has what each part's copy takes in one direction, `updates` what each update takes. A part comes
    only when the one two before it has gone, so that two are there at most.
    """
    out, home = Lane(), Lane()
    now = gone = 0.0
    come = home.carry(parts[0], now)[1] if parts else 0.0
    for number, update in enumerate(updates):
        now = max(now, gone)
        following = home.carry(parts[number + 1], now)[1] if number + 1 < len(parts) else 0.0
        now = max(now, come) + update
        gone = out.carry(parts[number], now)[1]
        come = following
    return max(now, gone) - sum(updates)


_WORK, _OUT, _GONE, _BACK, _ASKED = range(5)


class _Run:
    """Goes through the moments at which work is inserted, a copy is queued or one is awaited.

    Those of one task come in this order: its inserted work, copies out that are queued, copies out that are
    awaited, and the same of copies home.
    """

    def __init__(self, step: Step, edits: Sequence[Edit]) -> None:
        self._clock = step.clock
        self._trips = tuple(trip for edit in edits for trip in edit.trips)
        self._inserts = [insert for edit in edits for insert in edit.inserts]
        self._lanes: dict[Way, Lane] = {"out": Lane(), "home": Lane()}
        self._copies: dict[tuple[int, Way], Carried] = {}
        self._delays: list[tuple[int, float]] = []
        self._delay = 0.0

    def run(self) -> Traffic:
        """All moments, in order."""
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
        found = [(insert.at, _WORK, number) for number, insert in enumerate(self._inserts)]
        for number, trip in enumerate(self._trips):
            found += [
                (trip.leaves, _OUT, number),
                (trip.gone, _GONE, number),
                (trip.back, _BACK, number),
                (trip.asked, _ASKED, number),
            ]
        return sorted((min(task, last), kind, number) for task, kind, number in found)

    def _queue(self, task: int, number: int, way: Way) -> None:
        self._later(task, self._trips[number].queueing)
        out = self._copies.get((number, "out"))
        earliest = max(self._now(task), out.end if out is not None else 0.0)
        start, end = self._lanes[way].carry(self._trips[number].seconds, earliest)
        self._copies[number, way] = Carried(number, way, start, end, 0.0)

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
