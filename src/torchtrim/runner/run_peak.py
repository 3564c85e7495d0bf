"""Peaks of the training steps of a planned run, measured at little or no cost."""

from __future__ import annotations

import os
import sys
import tempfile
import time
import weakref
from collections.abc import Callable
from typing import Literal

import torch

from torchtrim.capture.allocator import NOTHING, CpuAllocator, rss_bytes
from torchtrim.capture.watch import EVALUATED
from torchtrim.dispatch.patches import Patches
from torchtrim.dispatch.storages import reachable_bytes
from torchtrim.records.budget import MemoryKind

_SHARE = 0.01
"""Share of the run's time that watched steps may cost, beside the first of them."""


_MOST_FORKS = 8
"""Arbitrary: steps that are watched in vain before the watch is left to its share of the time."""
_FORKED = "not measured: the process forked in each watched step, as --verify-every and loaders do"


class PeakMeter:
    """Measures the highest peak of a run's steps; the base class measures nothing.

    `bytes` is None if nothing was measured; `how` describes the measurement, or says why there is none.
    """

    def __init__(self, how: str) -> None:
        self.bytes: int | None = None
        self.how = how

    def begins(self) -> None:
        """Begin a step."""

    def pauses(self) -> None:
        """Leave out the rest of the step, which evaluates."""

    def ends(self, step: int) -> bool:
        """End a step; return True if measuring it took time."""
        return False

    def close(self) -> None:
        """Stop measuring."""


class ProcessPeak(PeakMeter):
    """The peak of the process's resident memory, which the system keeps."""

    def __init__(self) -> None:
        super().__init__("of the whole process")

    def close(self) -> None:
        """Read it."""
        self.bytes = rss_bytes()


class CudaPeak(PeakMeter):
    """The caching allocator's own peak: a step counts if it raises it.

    It is never reset, since scripts report it too. A reset by the script begins anew.
    """

    def __init__(self, device: torch.device, kind: MemoryKind) -> None:
        super().__init__("")
        reads = {
            "allocated": torch.cuda.max_memory_allocated,
            "reserved": torch.cuda.max_memory_reserved,
        }
        self._read: Callable[[], int] = lambda: reads[kind](device)
        self._level = self._read()
        self._runs = False
        self._patches = Patches()
        for owner in (torch.cuda, torch.cuda.memory):
            name = "reset_peak_memory_stats"
            self._patches.replace(owner, name, self._resetting(getattr(owner, name)))

    def _resetting(self, original: Callable[..., None]) -> Callable[..., None]:
        def reset(*args: object, **kwargs: object) -> None:
            self._note()
            original(*args, **kwargs)
            self._level = self._read()

        return reset

    def begins(self) -> None:
        """Begin a step."""
        self._level, self._runs = self._read(), True

    def pauses(self) -> None:
        """Leave out the rest of the step."""
        self._note()
        self._runs = False

    def ends(self, step: int) -> bool:
        """End a step."""
        self.pauses()
        return False

    def _note(self) -> None:
        high = self._read()
        if self._runs and high > self._level:
            self.bytes, self._level = max(self.bytes or 0, high), high

    def close(self) -> None:
        """Stop; if no step has raised the peak, it was at most the one before the first step."""
        self._patches.undo()
        if self.bytes is None:
            self.bytes, self.how = self._level, "at most; reached outside the steps"


class CpuPeak(PeakMeter):
    """The CPU allocator's peak in a few steps, by the profiler's memory events.

    The second step is watched, and later ones while all of them together take at most 1 % of the time. Frees
    are reported only for blocks whose allocation was, so the step before is watched too. Of several processes
    it is the third step, as when the plan was made: `DistributedDataParallel` rebuilds buckets in the second.
    """

    def __init__(self) -> None:
        super().__init__("not measured: no step could be watched")
        self._allocator = CpuAllocator()
        self._phase: Literal["", "before", "seen", "step"] = ""
        self._alive = self._at = self._watched = self._paused = 0
        self._peak: int | None = None
        self._cost, self._is_first = 0.0, True
        self._forks = 0
        self._unwatched = int(int(os.environ.get("WORLD_SIZE", "1")) > 1)
        self._began = time.perf_counter()
        _at_fork.add(self)
        _know_unknown_blocks()

    def begins(self) -> None:
        """Begin to watch if it is time to."""
        begin = time.perf_counter()
        if self._unwatched:
            self._unwatched -= 1
        elif self._phase in ("before", "seen"):
            self._allocator.stop()
            self._alive = reachable_bytes()
            self._allocator.start()
            self._phase = "step"
        elif self._is_first or self._cost <= _SHARE * (begin - self._began):
            self._allocator.start()
            self._phase, self._is_first = "before", False
        self._cost += time.perf_counter() - begin

    def pauses(self) -> None:
        """Leave out the rest of the step; all events of a long evaluation would fill the memory."""
        begin = time.perf_counter()
        if self._phase == "step":
            watched = self._allocator.stop()
            self._peak = None if watched is NOTHING else self._alive + watched.peak
            self._phase = ""
        elif self._phase in ("before", "seen"):
            if self._phase == "before" or self._paused % EVALUATED == 0:
                self._allocator.stop()
                self._allocator.start()
            self._phase, self._paused = "seen", self._paused + 1
        self._cost += time.perf_counter() - begin

    def ends(self, step: int) -> bool:
        """End a step, and note its peak if it was watched."""
        if self._phase == "step":
            self.pauses()
        if self._peak is None:
            return bool(self._phase)
        self._watched += 1
        others = f", of {self._watched} watched" if self._watched > 1 else ""
        if self.bytes is None or self._peak > self.bytes:
            self.bytes, self._at = self._peak, step
        self.how = f"in step {self._at}{others}"
        self._peak = None
        return True

    def close(self) -> None:
        """Stop watching."""
        _at_fork.discard(self)
        self.abandon()

    def abandon(self) -> None:
        """Stop watching this step, without a result."""
        self._allocator.stop()
        self._phase = ""

    def forks(self) -> None:
        """Stop watching before the process forks; soon try again, since the next steps may not fork."""
        if self._phase:
            self._forks += 1
            self._is_first = self._forks < _MOST_FORKS
            if self.bytes is None:
                self.how = _FORKED
        self.abandon()


def meter_for(device: torch.device, kind: MemoryKind) -> PeakMeter:
    """Return the meter for a budget of this kind on a device."""
    if kind == "rss":
        return ProcessPeak()
    if device.type == "cuda":
        return CudaPeak(device, kind)
    if device.type == "cpu" and kind == "allocated":
        return CpuPeak()
    return PeakMeter(f"not measured: {device.type} reports no {kind} memory")


_at_fork: weakref.WeakSet[CpuPeak] = weakref.WeakSet()


def _before_fork() -> None:
    """Stop the profiler, which would run in the child too, as in a loader's worker, and never end there."""
    for one in list(_at_fork):
        one.forks()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before_fork)


_UNKNOWN = b"Memory block of unknown size"


def _know_unknown_blocks() -> None:
    """Keep torch's warning about the first block that it frees without having seen its allocation.

    All else that is written to stderr meanwhile is passed on.
    """
    block = torch.empty(1, dtype=torch.uint8, device="cpu")
    allocator = CpuAllocator()
    sys.stderr.flush()
    with tempfile.TemporaryFile() as file:
        theirs = os.dup(2)
        try:
            os.dup2(file.fileno(), 2)
            allocator.start()
            del block
            allocator.stop()
        finally:
            os.dup2(theirs, 2)
            os.close(theirs)
        file.seek(0)
        for line in file:
            if _UNKNOWN not in line:
                os.write(2, line)
