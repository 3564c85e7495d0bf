"""A profiler trace in memory: what the reader leaves and the analyses work on. Times in microseconds."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
from msgspec import Struct

Lane = tuple[str, str]
Number = int | float | str | None


class Args(Struct, gc=False):
    """The arguments of an event that some analysis needs; all others are skipped while reading."""

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
        """When it ended, in microseconds."""
        return self.ts + self.dur


class Trace(Struct, kw_only=True):
    """One rank's trace, its events in the order of their start.

    `operators` are ATen operators and annotations of a host thread, `frames` its Python functions,
    `calls` its calls of the runtime or driver, `activities` what ran on a device, `waits` the profiler's
    own account of synchronizations. `base` is the absolute time in microseconds from which `ts` counts.
    `notes` say what was unusual about the file.
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
        """When the first event of host or device starts, in microseconds; see `ended`."""
        return min((event.ts for event in self._counting()), default=0.0)

    def ended(self) -> float:
        """When the last event of host or device ends, in microseconds.

        Queries are not counted: watchdog threads poll on after the work is done.
        """
        return max((event.ts + event.dur for event in self._counting()), default=0.0)

    def _counting(self) -> Iterator[Event]:
        yield from self.operators
        yield from self.annotations
        yield from self.activities
        yield from (call for call in self.calls if "Query" not in call.name)
