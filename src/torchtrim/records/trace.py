"""What was found in a profiler trace: the JSON of `torchtrim trace`. Times in milliseconds."""

from __future__ import annotations

from typing import Literal

import msgspec
from msgspec import Struct

Bound = Literal["host", "device", "waits", "loader", "mixed", "unknown"]
Phase = Literal["forward", "backward"]


class TraceSite(Struct, frozen=True, kw_only=True):
    """A sync point: a place at which the host synchronizes with the device.

    `line` is that of the call where `exact`, else of the function's definition; `lines` are the calls of
    the function that it may be, where the source was given and it is one of several. `path` is empty
    where the trace has no stacks; `within` then says which annotation or operator it happened in. A wait
    of the backward pass is at its forward operator's line. `op` is the innermost operator, or the
    runtime's call outside of any. `count` is how often the host blocked there: a copy and the
    synchronization that belongs to it are once. `wait_ms` is how long the calls took as recorded,
    `saves_alone_ms` what the replay says the whole would gain if only this site did not wait; null where
    the trace cannot be replayed.
    """

    path: str
    function: str
    line: int
    op: str
    count: int
    wait_ms: float
    saves_alone_ms: float | None
    exact: bool = False
    lines: tuple[int, ...] = ()
    within: str = ""
    phase: Phase = "forward"


class TraceSet(Struct, frozen=True, kw_only=True):
    """Sites, by their number in `sites`, and what the whole would gain if none of them waited."""

    sites: tuple[int, ...]
    saves_ms: float


class TraceRank(Struct, frozen=True, kw_only=True):
    """A rank among others. `clock_ms`: how far its clock is ahead of the first rank's, null where they share
    no collective. `collectives_ms` is how long collectives ran, `exposed_ms` how long nothing else did then,
    `waiting_ms` how long it was in collectives before the last rank came. `last`: how often it came last;
    `made_others_wait_ms`: how long the others were in collectives before it came, all together.
    """

    rank: int
    clock_ms: float | None
    collectives: int
    collectives_ms: float
    exposed_ms: float
    waiting_ms: float
    last: int
    made_others_wait_ms: float


class TraceJob(Struct, frozen=True, kw_only=True):
    """What ranks had to do with each other: `collectives` that two traces or more share, and those of all
    that are `unmatched`. `straggler` is the rank for which the others waited longest, null where that is
    less than a hundredth of the time."""

    collectives: int
    unmatched: int
    ranks: tuple[TraceRank, ...]
    straggler: int | None = None


class TraceReport(Struct, frozen=True, kw_only=True):
    """What was found in one rank's trace; for several ranks the slowest one's, and each in `ranks`,
    and in `job` what they had to do with each other.

    `sync_calls` are calls that synchronize with a stream, an event or by copying; `blocking_copies` are
    copies from or to pageable memory. Synchronizations with the whole device are apart: `device_syncs`
    are the program's own, `profiler_syncs` counts those that the profiler made for itself. `replay_ms` is
    the span that the replay gives with all waits, to be compared with `span_ms`, the measured one.
    `steps` are those that the program marked with `profiler.step()`; all figures are of the whole trace.
    `bound` names what the span depends on most.
    """

    schema_version: Literal[1] = 1
    torchtrim: str
    verb: Literal["trace"] = "trace"
    file: str
    rank: int | None
    device: str
    versions: dict[str, str]
    events: int
    steps: int = 0
    sync_calls: int
    blocking_copies: int
    span_ms: float
    replay_ms: float | None
    device_busy_ms: float
    host_waiting_ms: float
    sites: tuple[TraceSite, ...]
    sets: tuple[TraceSet, ...]
    bound: Bound
    device_syncs: tuple[TraceSite, ...] = ()
    profiler_syncs: int = 0
    loader_ms: float = 0.0
    notes: tuple[str, ...] = ()
    ranks: tuple[TraceReport, ...] = ()
    job: TraceJob | None = None

    @property
    def waits(self) -> int:
        """How often the host blocked, device-wide synchronizations of the program included."""
        return sum(site.count for site in (*self.sites, *self.device_syncs))


def schema() -> dict[str, object]:
    """JSON Schema of `trace --json`."""
    return msgspec.json.schema(TraceReport)
