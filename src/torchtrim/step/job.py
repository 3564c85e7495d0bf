"""The steps of several ranks on one clock: their collectives, the last rank, and the ranks that waited."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

from torchtrim.records.profile import Collective, Profile

# A backend's thread may note the end of a collective late: it may wait for the interpreter for 5 ms
# and more.
_LATE_SECONDS = 0.02
# The limit of that delay as a share of the collective. Arbitrary; short collectives allow less.
_LATE_SHARE = 0.05
_POINT_TO_POINT = ("send", "recv", "recv_any_source")


class RankCollective(NamedTuple):
    """A collective on one rank. Times are in seconds on the job's clock.

    `blocked`: how long the rank did nothing else, its waits included.
    """

    rank: int
    operator: int
    start: float
    end: float
    blocked: float


class JobCollective(NamedTuple):
    """A collective, with its times on each rank that takes part."""

    name: str
    group: str
    bytes: int
    parts: tuple[RankCollective, ...]

    @property
    def last(self) -> RankCollective:
        """The rank that came last."""
        return max(self.parts, key=lambda part: part.start)

    def waited(self, part: RankCollective) -> float:
        """Return how long a rank was blocked before the last one arrived."""
        return max(min(part.blocked, self.last.start - part.start), 0.0)


class Job(NamedTuple):
    """Profiles of the same step, one per rank, and the start of each on the clock, in seconds."""

    profiles: tuple[Profile, ...]
    begins: tuple[float, ...]
    exchanges: tuple[JobCollective, ...]

    @property
    def seconds(self) -> float:
        """The longest step."""
        return max(profile.step_seconds for profile in self.profiles)


def job_of(profiles: Sequence[Profile]) -> Job:
    """Return the job whose ranks have these profiles."""
    ordered = tuple(sorted(profiles, key=lambda profile: profile.rank))
    first = min(profile.clock for profile in ordered)
    begins = tuple(profile.clock - first for profile in ordered)
    exchanges = sorted(_exchanges(ordered, begins), key=lambda one: one.parts[0].start)
    return Job(ordered, begins, tuple(exchanges))


def _exchanges(profiles: Sequence[Profile], begins: Sequence[float]) -> Iterator[JobCollective]:
    """Match the collectives of a group by their order, the same on all ranks, up to the first mismatch."""
    members: defaultdict[str, list[list[tuple[Collective, RankCollective]]]] = defaultdict(list)
    for profile, begin in zip(profiles, begins, strict=True):
        own: defaultdict[str, list[tuple[Collective, RankCollective]]] = defaultdict(list)
        for call, blocked in zip(profile.collectives, blocked_seconds(profile), strict=True):
            if call.name not in _POINT_TO_POINT:
                start = begin + call.start
                end = start + (call.seconds or 0.0)
                part = RankCollective(profile.rank, call.operator, start, end, blocked)
                own[call.group].append((call, part))
        for group, parts in own.items():
            members[group].append(parts)
    for group, of_ranks in members.items():
        for together in zip(*of_ranks, strict=False):
            names = {call.name for call, _ in together}
            if len(names) > 1:
                break
            largest = max(call.bytes for call, _ in together)
            yield JobCollective(names.pop(), group, largest, tuple(part for _, part in together))


def blocked_seconds(profile: Profile) -> list[float]:
    """Return, for each collective of a rank, how long the rank did nothing but await it.

    A rank waits between two operators if a collective ends there: from the end of the first operator, or from
    the start of the collective. A thread of the backend notes that end, possibly after the rank continued.
    """
    gaps = [*_gaps(profile)]
    begins, ends = [begin for begin, _ in gaps], [end for _, end in gaps]
    spans = [
        (call.start, call.start + (call.seconds or 0.0), number)
        for number, call in enumerate(profile.collectives)
    ]
    blocked = [0.0] * len(spans)
    waited_until = 0.0
    for start, end, number in sorted(spans, key=lambda span: span[1]):
        late = min(_LATE_SECONDS, _LATE_SHARE * (end - start))
        earliest = max(start, waited_until)
        near = gaps[bisect_left(ends, end - late) : bisect_right(begins, end)]
        waited = max((min(end, over) - max(gap, earliest) for gap, over in near), default=0.0)
        if waited > 0:
            blocked[number] = waited
            waited_until = end
    return blocked


def _gaps(profile: Profile) -> Iterator[tuple[float, float]]:
    """Yield the times between which no operator runs; the last gap never ends."""
    spans = [(op.start, op.start + op.seconds) for op in profile.operators]
    for (_, end), (start, _) in pairwise(spans):
        yield end, max(start, end)
    if spans:
        yield spans[-1][1], float("inf")
