"""Threads that wait for each other."""

from pathlib import Path

from recordings import BACKWARD, MAIN, Recording
from torchtrim.traces.hand_over import hand_overs
from torchtrim.traces.launches import schedule


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
