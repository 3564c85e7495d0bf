"""Wall time, CPU time and time spent in the scheduler's queue. Tests supply their own clock."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable
from typing import NamedTuple

_SCHEDULED = "/proc/thread-self/schedstat"


class _Scheduled:
    """The file that holds the queueing time of the thread that opens it; `number` is -1 except on Linux.

    The file is closed with its thread, unless a daemon has closed all descriptors and reused this one.
    """

    def __init__(self) -> None:
        self.number, self._is = -1, (0, 0)
        if sys.platform == "linux":
            with contextlib.suppress(OSError):
                self.number = os.open(_SCHEDULED, os.O_RDONLY | os.O_CLOEXEC)
                self._is = _identity(self.number)

    def __del__(self, over: Callable[[], bool] = sys.is_finalizing) -> None:
        if self.number < 0 or over():
            return
        with contextlib.suppress(OSError):
            if _identity(self.number) == self._is:
                os.close(self.number)


def _identity(number: int) -> tuple[int, int]:
    status = os.fstat(number)
    return status.st_dev, status.st_ino


class _QueueLocal(threading.local):
    def __init__(self) -> None:
        self.scheduled = _Scheduled()


_local = _QueueLocal()


def _begin_again() -> None:
    """Reopen the file after a fork: the inherited one describes the parent's thread."""
    _local.scheduled.number = -1  # not closed, since it may belong to another file by now
    _local.scheduled = _Scheduled()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_begin_again)


def queued_ns() -> int:
    """Return the nanoseconds this thread has spent runnable but waiting for a free core.

    Return 0 if the system does not record it. A call takes less than a microsecond. The scheduler has its
    own clock, so the queueing time can exceed the elapsed time by some microseconds.
    """
    number = _local.scheduled.number
    if number < 0:
        return 0
    try:
        return int(os.pread(number, 64, 0).split()[1])
    except (OSError, ValueError, IndexError):
        return 0


def now() -> float:
    """Return seconds on a clock that stops while this thread waits for a core."""
    return time.perf_counter() - queued_ns() / 1e9


class Clock(NamedTuple):
    """Functions that return seconds: wall time, time this thread worked, and CPU time of the process."""

    now: Callable[[], float]
    busy: Callable[[], float]
    cores: Callable[[], float]


def _busy() -> float:
    """Return the thread's CPU time, plus its queueing time on Linux.

    Without the queueing time, decoding on a loaded machine would look like disk access. Process CPU time does
    not work either: spinning threads would make disk access look like decoding.
    """
    return time.thread_time() + queued_ns() / 1e9


CLOCK = Clock(time.perf_counter, _busy, time.process_time)
