"""Clean, pause and stop by memory usage, with hysteresis.

Levels as in Dask's workers: at `spill`, cleaning starts and continues down to `target`; from `pause` on, no
new work should start; `terminate` is an error. All are fractions of a limit.
"""

from __future__ import annotations

import enum
import time
import warnings
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch

from torchtrim.errors import TorchtrimError, UsageError, is_out_of_memory
from torchtrim.stream.growth import device_bytes, host_bytes, process_bytes, release_caches
from torchtrim.stream.store import StateStore

Result = TypeVar("Result")


class Level(enum.Enum):
    """Outcome of a check, after cleaning."""

    FINE = "fine"
    CLEANED = "cleaned"
    PAUSED = "paused"


class MemoryExhausted(TorchtrimError):
    """Memory is full even after cleaning. Entries that may still be read are not lost."""


class UnmanagedMemory(ResourceWarning):
    """The watched state holds less than half of the memory in use."""


class Watermarks:
    """Keeps stores below a limit in bytes: call `check()` after each frame.

    Only `check()` cleans stores with `every=0`. `measure()` returns the bytes in use, by default the bytes in
    the stores themselves, so usage exceeds `spill * limit` by one frame at most.

    `cleanings` counts the checks that freed something; `highest` is the highest measurement. Warns with
    `UnmanagedMemory`, once until usage falls, if cleaning freed nothing and the stores hold less than half
    of the memory in use.
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
                f"limit={limit}, target={target}, spill={spill}, pause={pause}, terminate={terminate}: pass "
                "a limit in bytes above zero and fractions with 0 < target <= spill <= pause <= terminate."
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
        """Watch the memory of the container or the host against its size."""
        return cls(stores, host_bytes()[1], measure=lambda: host_bytes()[0], **shares)

    @classmethod
    def of_device(
        cls, stores: StateStore | Sequence[StateStore], device: torch.device | str, **shares: float
    ) -> Watermarks:
        """Watch the memory of a device against its size."""
        total = device_bytes(device)[1]
        return cls(stores, total, measure=lambda: device_bytes(device)[0], **shares)

    def check(self) -> Level:
        """Measure, and clean from `spill` down to `target`. Raises `MemoryExhausted` at `terminate`.

        Entries beyond their lifetime are evicted first; then stores with a `spill` spill in the order of
        their policy. Entries that may still be read are never lost. Returns `PAUSED` from `pause` until
        usage is below `spill` again.
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
            spills = all(store.spills for store in self.stores)
            advice = (
                "Everything that can be spilled is: provide more memory, or find what else grows."
                if spills
                else "Provide more memory, a spill, or shorter lifetimes."
            )
            raise MemoryExhausted(
                f"{used} bytes are in use, above the last watermark of {self._terminate}, and nothing more "
                f"can be freed: the watched state holds {self._managed()} bytes. Nothing was lost. "
                f"{advice}"
            )
        self.paused = used >= (self._spill if self.paused else self._pause)
        if self.paused:
            return Level.PAUSED
        return Level.CLEANED if cleaned else Level.FINE

    def wait(self, seconds: float, every: float = 0.05) -> bool:
        """Check repeatedly while paused, for at most `seconds`. Return True if no longer paused."""
        end = time.monotonic() + seconds
        while self.check() is Level.PAUSED:
            if time.monotonic() >= end:
                return False
            time.sleep(every)
        return True

    def guard(self, work: Callable[..., Result], *args: Any, **kwargs: Any) -> Result:
        """Run `work`. If memory runs out, free what can be freed and run it once more.

        Evicts entries beyond their lifetime and spills all that can be spilled. `work` must be repeatable,
        such as a frame with its number. Raises `MemoryExhausted` if memory runs out again.
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
                f"memory ran out, {freed} bytes of state were freed, and it ran out again. Nothing was "
                "lost: entries that may still be read are in memory or spilled. Use smaller images, fewer "
                "objects or more memory."
            ) from error

    def _managed(self) -> int:
        return sum(store.bytes for store in self.stores)

    def _clean(self, nbytes: int) -> int:
        freed = sum(store.retire() for store in self.stores)
        for store in sorted(self.stores, key=lambda one: -one.bytes):
            if freed < nbytes:
                freed += store.relieve(nbytes - freed)
        return freed

    def _warn(self, used: int) -> None:
        managed = self._managed()
        if managed * 2 < used and not self._warned:
            self._warned = True
            warnings.warn(
                f"{used} bytes are in use and the watched state holds only {managed} of them, so cleaning "
                "frees nothing. Something else grows, or freed memory is not returned to the system "
                "(MALLOC_TRIM_THRESHOLD_=65536 helps with glibc).",
                UnmanagedMemory,
                stacklevel=3,
            )
