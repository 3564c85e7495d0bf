"""Clean, pause and stop by how full memory is, with hysteresis.

Levels as in Dask's workers: at `spill` cleaning starts and goes on to `target`; from `pause` on nothing new
should be begun; at `terminate` it is an error. All are shares of a limit.
"""

from __future__ import annotations

import enum
import time
import warnings
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch

from torchtrim.errors import TorchtrimError, UsageError, is_out_of_memory
from torchtrim.stream.memory_use import device_bytes, host_bytes, process_bytes, release_caches
from torchtrim.stream.store import StateStore

Result = TypeVar("Result")


class Level(enum.Enum):
    """What a check found, after it did what it could."""

    FINE = "fine"
    CLEANED = "cleaned"
    PAUSED = "paused"


class MemoryExhausted(TorchtrimError):
    """Memory is full and nothing more can be let go. Nothing that may still be read was lost."""


class UnmanagedMemory(ResourceWarning):
    """Most of the memory in use is not of the state that is watched."""


class Watermarks:
    """Keeps stores below a limit in bytes: call `check()` after each frame.

    Stores with `every=0` are cleaned by it alone. `measure()` gives the bytes in use; by default those of
    the stores themselves, so that usage is above `spill * limit` by one frame at most.

    `cleanings` counts the checks that freed something, `highest` is the most that was measured. A warning
    `UnmanagedMemory` is given, once until usage falls, where cleaning brought nothing and the stores hold
    less than half of what is in use.
    """

    def __init__(
        self,
        stores: StateStore | Sequence[StateStore],
        limit: int,
        *,
        measure: Callable[[], int] | None = None,
        target: float = 0.6,
        spill: float = 0.7,
        pause: float = 0.8,
        terminate: float = 0.95,
    ) -> None:
        if limit <= 0 or not 0 < target <= spill <= pause <= terminate:
            raise UsageError(
                f"limit={limit}, target={target}, spill={spill}, pause={pause}, terminate={terminate}: the "
                "limit is in bytes and above zero, and the shares rise: 0 < target <= spill <= pause <= "
                "terminate."
            )
        self.stores = [stores] if isinstance(stores, StateStore) else list(stores)
        self.limit = limit
        self.cleanings = 0
        self.highest = 0
        self.paused = False
        self._measure = measure or self._managed
        self._target, self._spill = int(target * limit), int(spill * limit)
        self._pause, self._terminate = int(pause * limit), int(terminate * limit)
        self._warned = False

    @classmethod
    def of_process(
        cls, stores: StateStore | Sequence[StateStore], limit: int, **shares: float
    ) -> Watermarks:
        """Watch the resident memory of this process against a limit in bytes."""
        return cls(stores, limit, measure=process_bytes, **shares)

    @classmethod
    def of_host(cls, stores: StateStore | Sequence[StateStore], **shares: float) -> Watermarks:
        """Watch the container or the host against the memory that it has."""
        measure = lambda: host_bytes()[0]  # noqa: E731
        return cls(stores, host_bytes()[1], measure=measure, **shares)

    @classmethod
    def of_device(
        cls, stores: StateStore | Sequence[StateStore], device: torch.device | str, **shares: float
    ) -> Watermarks:
        """Watch a device against the memory that it has."""
        measure = lambda: device_bytes(device)[0]  # noqa: E731
        return cls(stores, device_bytes(device)[1], measure=measure, **shares)

    def check(self) -> Level:
        """Measure, and clean from `spill` down to `target`. Raises `MemoryExhausted` at `terminate`.

        What is over goes first, then stores that have a `spill` spill in the order of their policy. What may
        still be read is never lost. Returns `PAUSED` from `pause` until usage is below `spill` again.
        """
        used = self._measure()
        self.highest = max(self.highest, used)
        cleaned = False
        if used >= self._spill:
            cleaned = self._clean(used - self._target) > 0
            self.cleanings += cleaned
            before, used = used, self._measure()
            if used >= self._spill and not cleaned:
                self._warn(before)
        else:
            self._warned = False
        if used >= self._terminate:
            raise MemoryExhausted(
                f"{used} bytes are in use, {self._terminate} are the last watermark, and nothing more can be "
                f"let go: the watched state holds {self._managed()} of them. Nothing was lost. "
                f"{self._advice()}"
            )
        self.paused = used >= (self._spill if self.paused else self._pause)
        if self.paused:
            return Level.PAUSED
        return Level.CLEANED if cleaned else Level.FINE

    def wait(self, seconds: float, every: float = 0.05) -> bool:
        """While paused, check again until it is over or the time is. Returns whether it is over."""
        end = time.monotonic() + seconds
        while self.check() is Level.PAUSED:
            if time.monotonic() >= end:
                return False
            time.sleep(every)
        return True

    def guard(self, work: Callable[..., Result], *args: Any, **kwargs: Any) -> Result:
        """Do `work`; if memory runs out, let go what can be, and do it once more.

        What is over goes and all that can be spilled is; nothing else is. `work` must be such that it can
        be begun again, such as a frame with its number. Raises `MemoryExhausted` if it runs out again.
        """
        try:
            return work(*args, **kwargs)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
        freed = self._clean(sum(store.bytes for store in self.stores))
        release_caches()
        self.cleanings += freed > 0
        try:
            return work(*args, **kwargs)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            raise MemoryExhausted(
                f"memory ran out, {freed} bytes of state were let go, and it ran out again. Nothing was "
                "lost: what may still be read is there or spilled. Smaller images, fewer objects or more "
                "memory are needed."
            ) from error

    def _advice(self) -> str:
        if not all(store.spills for store in self.stores):
            return "Give more memory, a spill, or shorter lifetimes."
        return (
            "All that can be spilled is: give more memory, or see what else of the process grows."
        )

    def _managed(self) -> int:
        return sum(store.bytes for store in self.stores)

    def _clean(self, nbytes: int) -> int:
        freed = 0
        for store in self.stores:
            freed += store.retire()
        for store in sorted(self.stores, key=lambda one: -one.bytes):
            if freed < nbytes:
                freed += store.relieve(nbytes - freed)
        return freed

    def _warn(self, used: int) -> None:
        managed = self._managed()
        if managed * 2 < used and not self._warned:
            self._warned = True
            warnings.warn(
                f"{used} bytes are in use and only {managed} of them are of the watched state, so cleaning "
                "brings nothing. Something else grows, or freed memory is not given back to the system "
                "(MALLOC_TRIM_THRESHOLD_=65536 helps with glibc).",
                UnmanagedMemory,
                stacklevel=3,
            )
