"""The steps of several ranks on one clock: what they exchange, who came last, and who waited for it."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

from torchtrim.records.profile import Collective, Profile

_LATE_SECONDS = 0.02
_LATE_SHARE = 0.05
"""Of a collective: how late its end may be noted. A thread may not get the interpreter for 5 ms and more."""
_POINT_TO_POINT = ("send", "recv", "recv_any_source")


class Part(NamedTuple):
    """A collective as one rank had it. Times are in seconds on the job's clock.

    `blocked`: for how long the rank did nothing else. Its waits are in it.
    """

    rank: int
    operator: int
    start: float
    end: float
    blocked: float


class Exchange(NamedTuple):
    """A collective, as each rank that takes part had it."""

    name: str
    group: str
    bytes: int
    parts: tuple[Part, ...]

    @property
    def last(self) -> Part:
        """That of the rank that came last."""
        return max(self.parts, key=lambda part: part.start)

    def waited(self, part: Part) -> float:
        """How long a rank was blocked before the last one came."""
        return max(min(part.blocked, self.last.start - part.start), 0.0)


class Job(NamedTuple):
    """Profiles of the same step, one of each rank, and where on the clock each begins, in seconds."""

    profiles: tuple[Profile, ...]
    begins: tuple[float, ...]
    exchanges: tuple[Exchange, ...]

    @property
    def seconds(self) -> float:
        """The longest step."""
        return max(profile.step_seconds for profile in self.profiles)


def job_of(profiles: Sequence[Profile]) -> Job:
    """The job that profiles of its ranks are of."""
    ordered = tuple(sorted(profiles, key=lambda profile: profile.rank))
    first = min(profile.clock for profile in ordered)
    begins = tuple(profile.clock - first for profile in ordered)
    found = [*_exchanges(ordered, begins)]
    return Job(ordered, begins, tuple(sorted(found, key=lambda one: one.parts[0].start)))


def _exchanges(profiles: Sequence[Profile], begins: Sequence[float]) -> Iterator[Exchange]:
    """The collectives of a group come in the same order on every rank; from where they do not, none."""
    members: defaultdict[str, list[list[tuple[Collective, Part]]]] = defaultdict(list)
    for profile, begin in zip(profiles, begins, strict=True):
        own: defaultdict[str, list[tuple[Collective, Part]]] = defaultdict(list)
        for one, blocked in zip(profile.collectives, blocked_seconds(profile), strict=True):
            if one.name not in _POINT_TO_POINT:
                start = begin + one.start
                end = start + (one.seconds or 0.0)
                own[one.group].append((one, Part(profile.rank, one.operator, start, end, blocked)))
        for group, parts in own.items():
            members[group].append(parts)
    for group, of_ranks in members.items():
        for together in zip(*of_ranks, strict=False):
            names = {one.name for one, _ in together}
            if len(names) > 1:
                break
            largest = max(one.bytes for one, _ in together)
            yield Exchange(names.pop(), group, largest, tuple(part for _, part in together))


def blocked_seconds(profile: Profile) -> list[float]:
    """For each collective of a rank, how long it did nothing but await that one.

    It waits between two operators where a collective ends there: from the first of them on, or from when
    the collective began. That it is over is noted by a thread of its backend, which may come to that when the
    rank goes on already.
    """
    gaps = [*_gaps(profile)]
    begins, ends = [begin for begin, _ in gaps], [end for _, end in gaps]
    spans = [
        (one.start, one.start + (one.seconds or 0.0), number)
        for number, one in enumerate(profile.collectives)
    ]
    blocked = [0.0] * len(spans)
    waited_until = 0.0
    for start, end, number in sorted(spans, key=lambda span: span[1]):
        late = min(_LATE_SECONDS, _LATE_SHARE * (end - start))
        begun = max(start, waited_until)
        there = gaps[bisect_left(ends, end - late) : bisect_right(begins, end)]
        found = max((min(end, over) - max(gap, begun) for gap, over in there), default=0.0)
        if found > 0:
            blocked[number] = found
            waited_until = end
    return blocked


def _gaps(profile: Profile) -> Iterator[tuple[float, float]]:
    """Between which times no operator runs; the last gap has no end."""
    spans = [(op.start, op.start + op.seconds) for op in profile.operators]
    for (_, end), (start, _) in pairwise(spans):
        yield end, max(start, end)
    if spans:
        yield spans[-1][1], float("inf")
