"""A profiler trace in memory, in microseconds, and the report of `torchtrim trace`, in milliseconds."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

import msgspec
from msgspec import Struct

Lane = tuple[str, str]
Number = int | float | str | None


class Args(Struct, gc=False):
    """The arguments of an event that an analysis needs; the reader skips all others."""

    correlation: Number = None
    external: Number = msgspec.field(default=None, name="External id")
    sequence: Number = msgspec.field(default=None, name="Sequence number")
    forward_thread: Number = msgspec.field(default=None, name="Fwd thread id")
    stack: str | None = msgspec.field(default=None, name="Call stack")
    stream: Number = None
    device: Number = None
    kind: Number = None
    collective: Number = msgspec.field(default=None, name="Collective name")
    group: Number = msgspec.field(default=None, name="Process Group Name")
    wait_stream: Number = msgspec.field(default=None, name="wait_on_stream")
    wait_record: Number = msgspec.field(default=None, name="wait_on_cuda_event_record_corr_id")


class Event(Struct, gc=False):
    """An event as the profiler wrote it. `ts` and `dur` are microseconds; `ts` counts from `Trace.base`."""

    ph: str = ""
    cat: str | None = ""
    name: str = ""
    pid: int | float | str | None = 0
    tid: int | float | str | None = 0
    ts: float = 0.0
    dur: float = 0.0
    id: int | float | str | None = None
    args: Args | None = None

    @property
    def end(self) -> float:
        """The end of the event, in microseconds."""
        return self.ts + self.dur


class Trace(Struct, kw_only=True):
    """One rank's trace, with events ordered by start.

    `operators` are the ATen operators and annotations of a host thread, `frames` its Python functions,
    `calls` its calls of the runtime or driver, `activities` the work on a device, `waits` the
    synchronizations that the profiler recorded itself. `base` is the absolute time, in microseconds, of `ts`
    0. `notes` describe anything unusual about the file.
    """

    source: str
    rank: int | None
    device: str
    versions: dict[str, str]
    base: float
    events: int
    operators: list[Event]
    annotations: list[Event]
    frames: list[Event]
    calls: list[Event]
    activities: list[Event]
    waits: list[Event]
    notes: list[str]

    def started(self) -> float:
        """Return the start of the first host or device event, in microseconds; see `ended`."""
        return min((event.ts for event in self._counting()), default=0.0)

    def ended(self) -> float:
        """Return the end of the last host or device event, in microseconds.

        Queries do not count: watchdog threads keep polling after the work is done.
        """
        return max((event.ts + event.dur for event in self._counting()), default=0.0)

    def _counting(self) -> Iterator[Event]:
        yield from self.operators
        yield from self.annotations
        yield from self.activities
        yield from (call for call in self.calls if "Query" not in call.name)


Bound = Literal["host", "device", "waits", "loader", "mixed", "unknown"]
Phase = Literal["forward", "backward"]


class TraceSite(Struct, frozen=True, kw_only=True):
    """A sync point: a place where the host synchronizes with the device.

    If `exact`, `line` is the line of the call, else of the function's definition; `lines` are the candidate
    calls in the function, if its source was given and there are several. `path` is empty if the trace has no
    stacks; then `within` names the enclosing annotation or operator. A wait in backward has the line of its
    forward operator. `op` is the innermost operator, or the runtime call if there is none. `count` is the
    number of times the host blocked: a copy and its synchronization count once. `wait_ms` is the recorded
    duration of the calls; `saves_alone_ms` is the time the whole trace would save if only this site did not
    wait, according to the replay; null if the trace cannot be replayed.
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
    """Sites, by index in `sites`, and the time the whole trace would save without their waits."""

    sites: tuple[int, ...]
    saves_ms: float


class TraceRank(Struct, frozen=True, kw_only=True):
    """One rank of a job.

    `clock_ms`: lead of its clock over the first rank's, null if they share no collective. `collectives_ms`:
    time in collectives; `exposed_ms`: the part that no other work hides; `waiting_ms`: time in collectives
    before the last rank joined. `last`: how often it joined last; `made_others_wait_ms`: total time the
    others waited in collectives for it.
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
    """Collectives of several ranks: `collectives` shared by two or more traces, and the `unmatched` ones.

    `straggler` is the rank the others waited for longest, null if that took less than 1 % of the time.
    """

    collectives: int
    unmatched: int
    ranks: tuple[TraceRank, ...]
    straggler: int | None = None


class TraceReport(Struct, frozen=True, kw_only=True):
    """The analysis of one rank's trace; for several ranks, of the slowest, with each rank's in `ranks` and
    their collectives in `job`.

    `sync_calls` counts calls that synchronize with a stream, an event or by copying; `blocking_copies` counts
    copies from or to pageable memory. Device-wide synchronizations are listed separately: `device_syncs` are
    the program's own, `profiler_syncs` counts the profiler's. `replay_ms` is the span of the replay with all
    waits, to compare with the measured `span_ms`. `steps` counts the steps marked with `profiler.step()`; all
    figures cover the whole trace. `bound` names what limits the span most.
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
        """Number of times the host blocked, including the program's device-wide synchronizations."""
        return sum(site.count for site in (*self.sites, *self.device_syncs))
