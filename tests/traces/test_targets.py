"""What each waiting call waited for."""

from pathlib import Path

from recordings import Recording
from torchtrim.costs.replay.program import Does, ReplayStep
from torchtrim.records.trace_events import Trace
from torchtrim.traces.build import build


def waits(trace: Trace) -> list[ReplayStep]:
    return [step for step in build(trace, {}).steps if step.does is Does.WAIT]


def two_streams() -> Recording:
    made = Recording()
    made.launch(0, 5, kernel=(10, 500), stream=7)
    made.launch(10, 5, kernel=(20, 2000), stream=20)
    return made


def test_the_device_waits_for_every_stream(tmp_path: Path) -> None:
    made = two_streams()
    made.call("cudaDeviceSynchronize", 20, 2005)
    (wait,) = waits(made.trace(tmp_path))
    assert set(wait.awaits) == {0, 1}


def test_a_stream_is_told_by_the_profiler(tmp_path: Path) -> None:
    made = two_streams()
    number = made.call("cudaStreamSynchronize", 20, 494)
    made.event(
        "cuda_sync", "Stream Sync", 21, 490, pid=0, tid=7, correlation=number, stream=7, device=0
    )
    (wait,) = waits(made.trace(tmp_path))
    assert wait.awaits == (0,)


def test_or_by_when_the_call_returned(tmp_path: Path) -> None:
    made = two_streams()
    made.call("cudaStreamSynchronize", 20, 494)
    (wait,) = waits(made.trace(tmp_path))
    assert wait.awaits == (0,)


def test_an_event_stands_for_what_was_before_it(tmp_path: Path) -> None:
    made = Recording()
    made.launch(0, 5, kernel=(10, 500))
    made.call("cudaEventRecord", 6, 1)
    made.launch(10, 5, kernel=(511, 3000))
    made.call("cudaEventSynchronize", 20, 495)
    (wait,) = waits(made.trace(tmp_path))
    assert wait.awaits == (0,)


def test_waiting_for_what_is_not_in_the_trace_is_kept(tmp_path: Path) -> None:
    made = Recording()
    made.launch(0, 5, kernel=(10, 50))
    made.call("cudaStreamSynchronize", 100, 5000)
    (wait,) = waits(made.trace(tmp_path))
    assert 4900 < wait.outside < 5000
