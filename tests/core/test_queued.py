"""What a thread waits for a core is told apart from what it waits for anything else."""

from __future__ import annotations

import multiprocessing
import os
import threading
import time
from pathlib import Path

import pytest

from torchtrim.core import clock as queued

pytestmark = pytest.mark.skipif(
    not Path("/proc/thread-self/schedstat").exists(), reason="only Linux says what threads wait for"
)


def _turn(seconds: float) -> None:
    until = time.perf_counter() + seconds
    while time.perf_counter() < until:
        pass


def _beside_another(answers: multiprocessing.Queue) -> None:  # type: ignore[type-arg]
    """Work for 0.5 s on one core with another process."""
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    other = multiprocessing.get_context("fork").Process(target=_turn, args=(1.0,))
    other.start()
    wall, worked, clock = time.perf_counter(), time.thread_time(), queued.now()
    _turn(0.5)
    answers.put((time.perf_counter() - wall, time.thread_time() - worked, queued.now() - clock))
    other.join()


def test_the_clock_stands_still_in_the_queue() -> None:
    """Two processes on one core: each works for a part of the time, and the clock goes for that part."""
    context = multiprocessing.get_context("fork")
    answers = context.Queue()
    process = context.Process(target=_beside_another, args=(answers,))
    process.start()
    wall, worked, clock = answers.get(timeout=30)
    process.join()
    assert worked < 0.9 * wall
    assert clock == pytest.approx(worked, abs=0.1 * wall)


def test_the_clock_goes_on_while_a_thread_sleeps() -> None:
    """Sleep is no queue: whoever waits for a disk or another rank waits."""
    begin = queued.now()
    time.sleep(0.05)
    assert queued.now() - begin > 0.04


def _open() -> int:
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


def test_each_thread_has_its_own_for_as_long_as_it_runs() -> None:
    """Another thread's queue is not this one's, and threads that came and went leave nothing open."""
    queued.queued_ns()
    before, numbers = _open(), [queued._local.scheduled.number]
    for _ in range(40):
        thread = threading.Thread(target=lambda: numbers.append(queued._local.scheduled.number))
        thread.start()
        thread.join()
    assert numbers[0] not in numbers[1:]
    assert _open() == before


def _fork_after_closing(mine: str, answers: multiprocessing.Queue) -> None:  # type: ignore[type-arg]
    """Close all that is open, as a daemon does, and fork with a file of one's own in its place."""
    number = queued._local.scheduled.number
    os.close(number)
    file = os.open(mine, os.O_RDONLY)
    os.dup2(file, number)
    child = os.fork()
    if child == 0:
        queued.queued_ns()
        os._exit(0 if str(Path(f"/proc/self/fd/{number}").readlink()) == mine else 1)
    answers.put(os.waitpid(child, 0)[1])


def test_a_file_that_took_its_number_is_left_alone(tmp_path: Path) -> None:
    mine = tmp_path / "mine"
    mine.write_text("1 2 3")
    context = multiprocessing.get_context("fork")
    answers = context.Queue()
    process = context.Process(target=_fork_after_closing, args=(str(mine), answers))
    process.start()
    assert answers.get(timeout=30) == 0
    process.join()


def test_nothing_is_said_where_there_is_nothing_to_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not on Linux, or the file is odd: 0."""
    monkeypatch.setattr(queued._local, "scheduled", queued._Scheduled())
    queued._local.scheduled.number = -1
    assert queued.queued_ns() == 0
    monkeypatch.setattr(queued.sys, "platform", "win32")
    assert queued._Scheduled().number == -1
