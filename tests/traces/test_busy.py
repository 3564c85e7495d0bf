"""Unions of intervals."""

from pathlib import Path

from recordings import Recording
from torchtrim.records.trace_events import Event
from torchtrim.traces.busy import covered, device_busy, loading


def test_what_overlaps_counts_once() -> None:
    events = [Event(ts=5, dur=10), Event(ts=0, dur=6), Event(ts=30, dur=1), Event(ts=7, dur=2)]
    assert covered(events) == 16
    assert covered([]) == 0


def test_streams_and_the_loader(tmp_path: Path) -> None:
    made = Recording()
    made.launch(0, 5, kernel=(10, 100))
    made.launch(6, 5, kernel=(50, 100), stream=20)
    made.op("enumerate(DataLoader)#_MultiProcessingDataLoaderIter.__next__", 200, 40)
    trace = made.trace(tmp_path)
    assert round(device_busy(trace)) == 140
    assert round(loading(trace)) == 40
