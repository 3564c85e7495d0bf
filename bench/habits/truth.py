"""The peaks of a script's first steps by torch's own allocator."""

from __future__ import annotations

import contextlib
import os
import runpy
import sys
from pathlib import Path
from typing import Any

from torch.profiler import ProfilerActivity, profile, record_function

from bench.habits.running import forked
from torchtrim.capture.watch import Listener, Watcher

_EXIT = os._exit
_MARK = "torchtrim.step"
_STEPS = 5


class _Marks(Listener):
    """Marks where steps begin, and writes the highest level within each of the first."""

    def __init__(self, profiler: Any) -> None:
        self._path = Path.cwd() / "peaks"  # the script may change its folder
        self._profiler = profiler
        self._ended = 0

    def training_begins(self) -> None:
        self._mark()

    def step_ends(self) -> None:
        self._ended += 1
        self._mark()
        if self._ended == _STEPS:
            self.close()

    def close(self) -> None:
        """Write the peaks and end the process."""
        self._profiler.stop()
        self._path.write_text(" ".join(map(str, _highest(self._profiler))))
        _EXIT(0)

    def _mark(self) -> None:
        with record_function(_MARK):
            pass


def _highest(profiler: Any) -> list[int]:
    events = profiler.profiler.kineto_results.events()
    events = [event for event in events if event.name() in ("[memory]", _MARK)]
    level = 0
    peaks: list[int] = []
    for event in sorted(events, key=lambda one: one.start_ns()):
        if event.name() == _MARK:
            peaks.append(level)
        else:
            level += event.nbytes()
        if peaks:
            peaks[-1] = max(peaks[-1], level)
    return peaks


def allocated(script: Path, folder: Path) -> list[int]:
    """Return the most bytes that torch's CPU allocator had given out in each of the script's first steps."""

    def body() -> None:
        profiler = profile(activities=[ProfilerActivity.CPU], profile_memory=True)
        profiler.start()
        sys.argv = [str(script)]
        sys.path[0] = str(script.parent)
        marks = _Marks(profiler)
        os._exit = lambda _: marks.close()  # a script that ends so has steps too
        with Watcher(marks), contextlib.suppress(BaseException):
            runpy.run_path(str(script), run_name="__main__")
        marks.close()

    forked(body, folder, exits=False)
    found = folder / "peaks"
    return [int(one) for one in found.read_text().split()] if found.exists() else []
