"""Start and end of tasks that wait for each other on several lanes."""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Iterable
from typing import NamedTuple


class LaneTask(NamedTuple):
    """A task of a lane, which takes `seconds`.

    It starts after the task before it on its lane, and no earlier than `earliest`. `after` holds pairs (key,
    gap): the task starts at least `gap` seconds after the end of that predecessor.
    """

    key: Hashable
    seconds: float
    after: tuple[tuple[Hashable, float], ...] = ()
    earliest: float = 0.0


def run_lanes(lanes: Iterable[Iterable[LaneTask]]) -> dict[Hashable, tuple[float, float]]:
    """Return the start and end of each task by its key, in seconds.

    Each lane runs its tasks in order. Raises `AssertionError` if tasks wait for each other forever.
    """
    times: dict[Hashable, tuple[float, float]] = {}
    queues = [deque(tasks) for tasks in lanes]
    free = [0.0] * len(queues)
    while any(queues):
        count = len(times)
        for lane, queue in enumerate(queues):
            while queue and all(key in times for key, _ in queue[0].after):
                task = queue.popleft()
                ready = [times[key][1] + gap for key, gap in task.after]
                start = max(free[lane], task.earliest, *ready)
                free[lane] = start + task.seconds
                times[task.key] = start, free[lane]
        assert len(times) > count, "the order waits for itself"
    return times
