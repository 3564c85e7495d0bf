"""Constants of the machine, from the trace itself."""

from pathlib import Path

from recordings import MAIN, Recording
from torchtrim.traces.latencies import Latencies, measure
from torchtrim.traces.launches import schedule


def test_the_machine_is_measured(tmp_path: Path) -> None:
    made = Recording()
    for n in range(20):
        made.launch(n * 1000, 4, kernel=(n * 1000 + 12, 50), tid=MAIN)
        made.launch(n * 1000 + 5, 4, kernel=(n * 1000 + 64, 100), tid=MAIN)
    found = measure(schedule(made.trace(tmp_path)))
    work = schedule(made.trace(tmp_path)).works[0]
    assert round(found.launch_of(work), 1) == 12
    assert round(found.gap_of(work), 1) == 2
    assert round(found.cost_of(work), 1) == 4


def test_what_was_not_seen_has_usual_values(tmp_path: Path) -> None:
    made = Recording()
    made.launch(0, 4, kernel=(12, 50))
    (work,) = schedule(made.trace(tmp_path)).works
    found = Latencies(launch={}, gap={}, cost={})
    assert 1 < found.launch_of(work) < 20
    assert 0 < found.gap_of(work) < 5
    assert found.back_of("stream") == found.back_of("event")
    assert found.least_of("stream") < 20
