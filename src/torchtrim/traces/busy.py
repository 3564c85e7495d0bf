"""How long the device worked, the host waited and the loader loaded. Unions of intervals, in microseconds."""

from __future__ import annotations

from collections.abc import Iterable

from torchtrim.records.trace_events import Event, Trace

_LOADER = ("enumerate(DataLoader)", "enumerate(IterableDataset)")


def covered(events: Iterable[Event]) -> float:
    """The time in which at least one of the events was going on."""
    total, until = 0.0, float("-inf")
    for begin, end in sorted((event.ts, event.ts + event.dur) for event in events):
        if end > until:
            total += end - max(begin, until)
            until = end
    return total


def device_busy(trace: Trace) -> float:
    """The time in which some stream of some device had a kernel, a copy or a fill running."""
    return covered(trace.activities)


def loading(trace: Trace) -> float:
    """The time in which the program was in its data loader's `next`."""
    marked = [e for e in (*trace.annotations, *trace.operators) if e.name.startswith(_LOADER)]
    return covered(marked)
