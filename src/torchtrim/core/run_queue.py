"""How long a thread stood in the queue for a core: what a loaded machine adds to any time."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable

_SCHEDULED = "/proc/thread-self/schedstat"


class _Scheduled:
    """The file in which Linux says what the thread that opens it waited for; -1 elsewhere.

    It is closed with its thread, if the number is still that file's: a daemon closes all that is open.
    """

    def __init__(self) -> None:
        self.number, self._is = -1, (0, 0)
        if sys.platform == "linux":
            with contextlib.suppress(OSError):
                self.number = os.open(_SCHEDULED, os.O_RDONLY | os.O_CLOEXEC)
                self._is = _identity(self.number)

    def forget(self) -> None:
        """It is another process's, and its number may be another file's."""
        self.number = -1

    def __del__(self, over: Callable[[], bool] = sys.is_finalizing) -> None:
        if self.number < 0 or over():
            return
        with contextlib.suppress(OSError):
            if _identity(self.number) == self._is:
                os.close(self.number)


def _identity(number: int) -> tuple[int, int]:
    found = os.fstat(number)
    return found.st_dev, found.st_ino


class _QueueLocal(threading.local):
    def __init__(self) -> None:
        self.scheduled = _Scheduled()


_local = _QueueLocal()


def _begin_again() -> None:
    """In a process that was forked the file is still that of the parent's thread."""
    _local.scheduled.forget()
    _local.scheduled = _Scheduled()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_begin_again)


def queued_ns() -> int:
    """Nanoseconds since this thread began in which it could have run, and no core was free.

    0 where the system does not say. A call takes less than a microsecond. The scheduler has a clock of its
    own, by which the queue can be some microseconds longer than the time that passed.
    """
    number = _local.scheduled.number
    if number < 0:
        return 0
    try:
        return int(os.pread(number, 64, 0).split()[1])
    except (OSError, ValueError, IndexError):
        return 0


def now() -> float:
    """Seconds by a clock that stands still while this thread waits for a core."""
    return time.perf_counter() - queued_ns() / 1e9
