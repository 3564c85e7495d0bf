"""Time that passes, and time in which this process is at work; tests bring their own."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple

from torchtrim.core.run_queue import queued_ns


class Clock(NamedTuple):
    """All in seconds: the time, that in which this thread worked, and that of all cores for this process."""

    now: Callable[[], float]
    busy: Callable[[], float]
    cores: Callable[[], float]


def _busy() -> float:
    """What this thread computed, and on Linux how long it was in the queue for a core.

    Without the queue a loaded machine would make decoding look like a disk; and threads that await
    others by turning in circles would make a disk look like decoding.
    """
    return time.thread_time() + queued_ns() / 1e9


CLOCK = Clock(time.perf_counter, _busy, time.process_time)
