"""What a replay runs: the steps of the host's threads and the activities that they launch.

Times are microseconds from the start of the trace. Durations and the host's time between calls are as
recorded; when an activity starts and when a waiting call returns is for `replay` to work out.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum
from typing import NamedTuple

NO_SITE = -1


class Does(IntEnum):
    """What a step does."""

    LAUNCH = 0
    WAIT = 1
    COPY = 2
    OUTSIDE = 3
    HAND_OVER = 4


class Activity(NamedTuple):
    """Work on a stream. It starts `ready` after its launch began, and `gap` after its stream is free.

    `after` are activities of other streams that must have ended. `extra` is a delay that none of these
    explains. An activity that overlapped the one before it on its stream starts `overlap` after that one
    started. A node of a graph starts `offset` after activity `anchor`. `floor` is the earliest time, for
    work that waited for something launched before the trace began.
    """

    number: int
    stream: int
    seconds: float
    ready: float
    gap: float
    after: tuple[int, ...] = ()
    extra: float = 0.0
    overlap: float | None = None
    anchor: int = -1
    offset: float = 0.0
    floor: float = 0.0


class ReplayStep(NamedTuple):
    """A step of host thread `lane`: it begins `gap` after the step before it and costs `cost`.

    A wait returns when all of `awaits` have ended, `back` later; `outside` is how much longer it took for
    reasons that are not in the trace. `site` is the place that it belongs to, and `without` what the call
    costs once the wait is gone. A hand-over starts the thread again `gap` after thread `of`.
    """

    does: Does
    lane: int
    gap: float
    cost: float
    launches: tuple[Activity, ...] = ()
    awaits: tuple[int, ...] = ()
    back: float = 0.0
    outside: float = 0.0
    site: int = NO_SITE
    without: float = 0.0
    of: int = -1


@dataclass(kw_only=True)
class ReplayProgram:
    """Steps in the order in which they began. `tails` is how long each thread went on after its last."""

    steps: list[ReplayStep] = field(default_factory=list)
    lanes: int = 0
    streams: int = 0
    activities: int = 0
    tails: list[float] = field(default_factory=list)
    begin: float = 0.0
    end: float = 0.0

    @property
    def span(self) -> float:
        """How long the trace took, in microseconds, as recorded."""
        return self.end - self.begin
