"""How long a thread stood in the queue for a core: what a loaded machine adds to any time."""

from __future__ import annotations

import os
import threading
import time

_SCHEDULED = "/proc/thread-self/schedstat"


class _Thread(threading.local):
    """The file in which Linux says what this thread waited for; -1 elsewhere."""

    def __init__(self) -> None:
        self.file = -1
        self.reopen()

    def reopen(self) -> None:
        """Open it for the thread that asks: after a fork it is still that of the parent."""
        self.__del__()
        try:
            self.file = os.open(_SCHEDULED, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            self.file = -1

    def __del__(self) -> None:
        if self.file >= 0:
            os.close(self.file)


_thread = _Thread()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_thread.reopen)


def queued_ns() -> int:
    """Nanoseconds since this thread began in which it could have run, and no core was free.

    0 where the system does not say. A call takes less than a microsecond.
    """
    try:
        return int(os.pread(_thread.file, 64, 0).split()[1])
    except (OSError, ValueError, IndexError):
        return 0


def now() -> float:
    """Seconds by a clock that stands still while this thread waits for a core."""
    return time.perf_counter() - queued_ns() / 1e9
