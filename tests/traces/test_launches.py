"""Calls and activities, joined and in order."""

from pathlib import Path

from recordings import Recording
from torchtrim.costs.replay import Does, ReplayStep
from torchtrim.records.trace import Trace
from torchtrim.traces.build import build
from torchtrim.traces.launches import schedule


def test_a_graph_is_one_launch_with_many_activities(tmp_path: Path) -> None:
    made = Recording()
    number = made.call("cudaGraphLaunch", 0, 50)
    for n in range(5):
        made.activity("node", 60 + 10 * n, 9, number, stream=7 if n < 4 else 20)
    plan = schedule(made.trace(tmp_path))
    assert len(plan.launches) == 1
    assert [work.number for work in plan.launches[0].works] == [0, 1, 2, 3, 4]
    assert {stream: len(works) for stream, works in plan.by_stream.items()} == {
        ("0", "7"): 4,
        ("0", "20"): 1,
    }


def test_a_call_inside_another_ends_the_outer_ones_own_work(tmp_path: Path) -> None:
    made = Recording()
    made.launch(0, 100, kernel=(110, 10), call="cudaGraphLaunch")
    made.launch(40, 10, kernel=(60, 10), call="cuLaunchKernel")
    outer, inner = schedule(made.trace(tmp_path)).launches
    assert (outer.time, outer.end, inner.gap) == (0, 40, 0)


def test_work_from_before_the_trace_comes_first(tmp_path: Path) -> None:
    made = Recording()
    made.activity("old", 50, 900, None)
    made.activity("older", 10, 30, 777)
    made.launch(0, 5, kernel=(960, 10))
    made.activity("lost", 1000, 10, 778)
    made.launch(40, 5, kernel=(1020, 10))
    plan = schedule(made.trace(tmp_path))
    assert [work.event.name for work in plan.works] == ["older", "old", "gemm", "lost", "gemm"]
    assert [work.call is not None for work in plan.works] == [False, False, True, False, True]


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
