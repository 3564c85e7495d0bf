"""What of a trace is taken as given, and what it depends on."""

from pathlib import Path

import pytest

from recordings import BACKWARD, MAIN, PAGEABLE, Recording
from torchtrim.costs.replay import Activity, Does, ReplayProgram, ReplayStep, replay
from torchtrim.traces.build import Latencies, build, hand_overs, measure
from torchtrim.traces.launches import schedule


def program(made: Recording, folder: Path) -> ReplayProgram:
    return build(made.trace(folder), {})


def activities(found: ReplayProgram) -> list[Activity]:
    return [one for step in found.steps for one in step.launches]


def idle(made: Recording, count: int, until: float) -> None:
    """Launches on an idle stream, from which the machine is measured."""
    for n in range(count):
        made.launch(until - (n + 1) * 100, 5, kernel=(until - (n + 1) * 100 + 10, 20))


def test_waiting_for_room_in_the_queue_is_worked_out_again(tmp_path: Path) -> None:
    """A launch that takes long while hundreds are queued waits for one of them, and not by itself."""
    made = Recording()
    for n in range(600):
        blocked = n >= 400
        at = n * 6 if not blocked else (n - 400) * 300 + 2400
        made.launch(at, 5 if not blocked else 295, kernel=(10 + n * 301, 300))
    found = program(made, tmp_path)
    waits = [step for step in found.steps if step.does is Does.WAIT]
    assert len(waits) > 100
    assert all(step.cost < 50 for step in waits)
    assert replay(found).span == pytest.approx(found.span, rel=0.01)
    assert replay(found, device=0.5).span == pytest.approx(found.span / 2, rel=0.05)


def test_a_stream_that_waited_for_another(tmp_path: Path) -> None:
    """The recorded event says nothing of it, and the other stream's end does."""
    made = Recording()
    idle(made, 5, 1000)
    made.launch(1000, 5, kernel=(1010, 3000), stream=7)
    made.launch(1010, 5, kernel=(4011, 50), stream=20)
    last = activities(program(made, tmp_path))[-1]
    assert last.after == (5,)
    assert last.extra == 0


def test_a_delay_without_a_cause_is_kept(tmp_path: Path) -> None:
    made = Recording()
    idle(made, 5, 1000)
    made.launch(1000, 5, kernel=(1010, 30))
    made.launch(1010, 5, kernel=(9000, 30))
    last = activities(program(made, tmp_path))[-1]
    assert last.extra == pytest.approx(7960, abs=20)


def test_kernels_that_overlapped_on_one_stream_may_again(tmp_path: Path) -> None:
    made = Recording()
    idle(made, 5, 1000)
    made.launch(1000, 5, kernel=(1010, 500))
    made.launch(1010, 5, kernel=(1400, 300))
    found = program(made, tmp_path)
    assert activities(found)[-1].overlap == pytest.approx(390)
    assert replay(found).span == pytest.approx(found.span, rel=0.01)


def test_a_small_upload_that_did_not_block(tmp_path: Path) -> None:
    """The copy began after its call had returned: the host did not wait."""
    made = Recording()
    idle(made, 5, 1000)
    made.launch(1000, 5, kernel=(1010, 500))
    name = "Memcpy HtoD (Pageable -> Device)"
    made.launch(1010, 6, kernel=(1512, 2), call="cudaMemcpyAsync", name=name)
    step = program(made, tmp_path).steps[-1]
    assert (step.does, step.awaits, step.cost) == (Does.WAIT, (), pytest.approx(6))


def test_a_blocking_copy_waits_for_its_own_end(tmp_path: Path) -> None:
    made = Recording()
    idle(made, 5, 1000)
    made.launch(1000, 5, kernel=(1010, 500))
    made.launch(1010, 510, kernel=(1511, 2), call="cudaMemcpyAsync", name=PAGEABLE)
    step = program(made, tmp_path).steps[-1]
    assert (step.does, step.awaits) == (Does.COPY, (6,))
    assert step.cost < 10
    assert step.back == pytest.approx(7, abs=0.01)


def test_a_thread_without_steps_counts_to_the_last_one_before(tmp_path: Path) -> None:
    made = Recording()
    made.launch(0, 5, kernel=(10, 50))
    made.op("aten::add", 0, 5000, tid=BACKWARD)
    found = program(made, tmp_path)
    assert found.lanes == 1
    assert found.tails == [pytest.approx(4995)]


def test_a_step_says_what_it_does() -> None:
    assert ReplayStep(Does.WAIT, 0, 1.0, 2.0).site == -1
    assert ReplayProgram(begin=2.0, end=5.0).span == 3.0


def test_the_machine_is_measured(tmp_path: Path) -> None:
    made = Recording()
    for n in range(20):
        made.launch(n * 1000, 4, kernel=(n * 1000 + 12, 50), tid=MAIN)
        made.launch(n * 1000 + 5, 4, kernel=(n * 1000 + 64, 100), tid=MAIN)
    found = measure(schedule(made.trace(tmp_path)))
    work = schedule(made.trace(tmp_path)).works[0]
    assert round(found.of("launch", work.kind), 1) == 12
    assert round(found.of("gap", work.kind), 1) == 2
    assert round(found.of("cost", work.kind), 1) == 4


def test_what_was_not_seen_has_usual_values(tmp_path: Path) -> None:
    made = Recording()
    made.launch(0, 4, kernel=(12, 50))
    (work,) = schedule(made.trace(tmp_path)).works
    found = Latencies(launch={}, gap={}, cost={})
    assert 1 < found.of("launch", work.kind) < 20
    assert 0 < found.of("gap", work.kind) < 5
    assert found.of("back", "stream") == found.of("back", "event")
    assert found.of("least", "stream") < 20


def steps(named: bool, overlap: bool = False) -> Recording:
    """Three steps of a forward thread and a backward thread, one after the other."""
    made = Recording()
    for step in range(3):
        begin = step * 4000
        for n in range(10):
            made.launch(begin + n * 50, 5, kernel=(begin + n * 50 + 10, 30), tid=MAIN)
            at = begin + (0 if overlap else 500) + n * 50 + 7
            made.launch(at, 5, kernel=(at + 10, 30), tid=BACKWARD, stream=20)
            if named:
                name = "autograd::engine::evaluate_function: MulBackward0"
                made.op(name, at - 1, 20, tid=BACKWARD, sequence=n, forward_thread=1)
    return made


def count(made: Recording, folder: Path) -> int:
    trace = made.trace(folder)
    return len(hand_overs(trace, schedule(trace)))


def test_the_autograd_engine_and_who_calls_it(tmp_path: Path) -> None:
    assert count(steps(named=True), tmp_path) == 5


def test_any_two_threads_whose_bursts_fill_each_others_gaps(tmp_path: Path) -> None:
    assert count(steps(named=False), tmp_path) == 3


def test_threads_that_work_at_once_are_independent(tmp_path: Path) -> None:
    assert count(steps(named=False, overlap=True), tmp_path) == 0
