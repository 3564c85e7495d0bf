"""Facts that rules about several ranks share."""

from __future__ import annotations

from collections import Counter, defaultdict
from itertools import pairwise
from typing import NamedTuple

from torchtrim.analysis.user_source import CodeLine, line_of, text_of
from torchtrim.records.profile import Profile
from torchtrim.step.job import Job

SHARE = 0.2
"""A fifth of the step is worth a finding."""


class Lag(NamedTuple):
    """A rank that others wait for: the seconds of the rank that waits longest, and how often.

    `loading`: by how much its own loader waits are longer than that rank's.
    """

    rank: int
    seconds: float
    times: int
    loading: float


def lags(job: Job) -> list[Lag]:
    """Return the ranks that others wait for, by a fifth of the step or more."""
    waited: defaultdict[tuple[int, int], float] = defaultdict(float)
    times: Counter[int] = Counter()
    for exchange in job.exchanges:
        last = exchange.last.rank
        times[last] += any(exchange.waited(part) > 0 for part in exchange.parts)
        for part in exchange.parts:
            waited[last, part.rank] += exchange.waited(part)
    loading = {p.rank: sum(wait.seconds for wait in p.waits) for p in job.profiles}
    found = []
    for last in times:
        seconds, other = max((waited[last, p.rank], p.rank) for p in job.profiles if p.rank != last)
        if seconds >= SHARE * job.seconds:
            more = max(loading[last] - loading[other], 0.0)
            found.append(Lag(last, seconds, times[last], more))
    return found


def slower_line(job: Job, rank: int) -> CodeLine:
    """Return the line with a rank's largest delay, or line 0 of the script if the ranks run different
    operators."""
    own = next(profile for profile in job.profiles if profile.rank == rank)
    others = [profile for profile in job.profiles if profile.rank != rank]
    names = [op.name for op in own.operators]
    alike = [other for other in others if [op.name for op in other.operators] == names]
    if not alike or not names:
        return CodeLine(own.script, 0)
    usual = [min(times) for times in zip(*map(_until_next, alike), strict=True)]
    excess = [mine - theirs for mine, theirs in zip(_until_next(own), usual, strict=True)]
    return line_of(own, excess.index(max(excess)))


def _until_next(profile: Profile) -> list[float]:
    ends = [0.0, *(op.start + op.seconds for op in profile.operators)]
    return [end - before for before, end in pairwise(ends)]


def line_with(profile: Profile, text: str) -> CodeLine:
    """Return the first line of the script that contains a text, or line 0."""
    lines = text_of(profile.project, profile.script).split("\n")
    number = next((number for number, line in enumerate(lines, 1) if text in line), 0)
    return CodeLine(profile.script, number)
