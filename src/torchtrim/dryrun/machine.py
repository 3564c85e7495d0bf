"""What calls of operators needed on this machine, as far as they were tried.

It is remembered in the user's cache folder, by the processor's instructions and torch's version: which of
oneDNN's implementations computes a call follows from these.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import platform
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch.autograd import profiler
from torch.utils._python_dispatch import _disable_current_modes

from torchtrim.core import caches
from torchtrim.dispatch import profilers
from torchtrim.dispatch.modes import tensors_among

_MOST_CALLS, _MOST_BYTES = 20_000, 2**24
_SETTINGS = ("ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA", "ATEN_CPU_CAPABILITY")


class _Own(profiler.profile):
    """Is prepared as all are, also where it is watched who prepares one."""

    _prepare: Any = profiler.profile._prepare_trace

    def _prepare_trace(self) -> None:
        self._prepare()


class _Kept(msgspec.Struct, forbid_unknown_fields=True):
    """The file: of which machine, and bytes by call."""

    machine: str
    calls: dict[str, int]


class Machine:
    """Bytes that calls took on one machine. A file that cannot be read is as none, and is replaced."""

    def __init__(self, name: str, path: Path | None) -> None:
        self.name = name
        self._path = path
        self._calls = self._read()
        self._is_saved = True
        self._may_try: bool | None = None

    def save(self) -> None:
        """Save the calls that were tried, with those that other processes saved meanwhile."""
        if self._is_saved or self._path is None:
            return
        self._is_saved = True
        self._calls = {**self._read(), **self._calls}
        if len(self._calls) > _MOST_CALLS:
            self._calls.clear()
        caches.write(self._path, msgspec.json.encode(_Kept(self.name, self._calls)))

    def once(self, name: str, attempt: Callable[[], int]) -> int | None:
        """Bytes that something took when it was first tried; None where it cannot be tried now."""
        if name not in self._calls:
            if not self._can_try():
                return None
            self._calls[name] = attempt()
            self._is_saved = False
        return self._calls[name]

    def may_try(self, allowed: bool | None) -> None:
        """Whether the process's profiler is free to be used; None: look."""
        self._may_try = allowed

    def _can_try(self) -> bool:
        if self._may_try is None:
            self._may_try = not profilers.waits_to_start()
        return self._may_try and not profilers.runs()

    def _read(self) -> dict[str, int]:
        try:
            if self._path is None or self._path.stat().st_size > _MOST_BYTES:
                return {}
            kept = msgspec.json.decode(self._path.read_bytes(), type=_Kept)
        except (OSError, ValueError):
            return {}
        sound = kept.machine == self.name and all(size >= 0 for size in kept.calls.values())
        return kept.calls if sound else {}


@functools.cache
def machine() -> Machine:
    """This one, as torch sees it from this process."""
    name = _name()
    short = hashlib.sha256(name.encode()).hexdigest()[:16]
    return Machine(name, caches.folder() / f"workspaces-{short}.json")


def needed(call: Callable[[], Any]) -> int:
    """Bytes that the allocator gives to a call beyond what its results hold."""
    with (
        _disable_current_modes(),
        torch.autocast("cpu", enabled=False),
        _Own(profile_memory=True) as seen,
    ):
        result = call()
    events: Any = seen.kineto_results
    level = highest = 0
    for event in events.events():
        if event.name() == "[memory]":
            level += event.nbytes()
            highest = max(highest, level)
    storages = {one.untyped_storage() for one in tensors_among((result,))}
    return max(0, highest - sum(one.nbytes() for one in storages))


def _name() -> str:
    settings = [f"{name}={os.environ[name]}" for name in _SETTINGS if name in os.environ]
    parts = (torch.__version__, torch.backends.cpu.get_cpu_capability(), *settings, _instructions())
    return " ".join(parts)


def _instructions() -> str:
    """The processor's instruction sets, where the system tells; else its name."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith(("flags", "Features")):
                return " ".join(sorted(line.partition(":")[2].split()))
    return platform.processor() or platform.machine()
