"""What kernels need on this machine, where a formula that was found on another may not hold.

Which of oneDNN's implementations computes a call follows from the processor's instructions: the same
convolution takes 2.3 MB of scratch on one with AVX-512, 0.8 MB on one with AMX too, and 2.7 MB with AVX2
alone. So a call is tried here once, with as many samples of zeros as take no time, and what it took is
remembered in the user's cache folder, by the processor's instructions and torch's version. Where the
formula holds for the trial it gives the bytes of the whole call; where it does not, bytes are taken to
grow with the samples as they did between two trials.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import platform
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import torch
from torch.autograd import profiler
from torch.utils._python_dispatch import _disable_current_modes

from torchtrim.core import caches
from torchtrim.dispatch import profilers
from torchtrim.dispatch.modes import tensors_among

_MOST_CALLS, _MOST_BYTES = 20_000, 2**24
_NEAR, _PADDING = 0.02, 1024
_SETTINGS = ("ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA", "ATEN_CPU_CAPABILITY")
Try = Callable[[int], int]
"""Bytes that a call needs beside its results, by its number of samples."""


class Call(NamedTuple):
    """A call of an operator with any number of samples. `name` tells all but that number.

    `attempt` runs it. `few` samples are the fewest that are computed as many are, and `most` what takes no
    time; where that is less than half as many, a call is not tried. `touched` is bytes of a sample's
    tensors.
    """

    name: str
    formula: Try
    attempt: Try
    touched: int
    most: int
    few: int = 2


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
        self._untried = False
        self._may_try: bool | None = None

    def needs(self, call: Call, samples: int) -> int:
        """Bytes that a call of so many samples needs beside its results."""
        if 2 * call.most < call.few:
            self._untried = True
            return call.formula(samples)
        most = max(call.most, call.few)
        many = samples if samples <= most else 1 << most.bit_length() - 1
        found = self._tried(call, many)
        if found is None or samples == many:
            return call.formula(samples) if found is None else found
        if abs(call.formula(many) - found) <= _NEAR * (many * call.touched + found) + _PADDING:
            return call.formula(samples)
        return self._grown(call, samples, many)

    def _grown(self, call: Call, samples: int, many: int) -> int:
        """Bytes grow as from half as many samples to these; a bound where they do not grow yet."""
        low = many // 2 if many // 2 >= call.few else many
        before, after = self._tried(call, low), self._tried(call, 2 * low)
        if before is None or after is None:
            return call.formula(samples)
        if before == after and samples > 2 * low:
            return max(after, call.formula(samples))
        return max(0, after + (after - before) * (samples - 2 * low) // low)

    def take_untried(self) -> bool:
        """Whether a call since this was last asked could not be tried, so that a formula told its bytes."""
        untried, self._untried = self._untried, False
        return untried

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
                self._untried = True
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

    def _tried(self, call: Call, samples: int) -> int | None:
        return self.once(f"{call.name} x {samples}", lambda: call.attempt(samples))

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
        torch.no_grad(),
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


def zeros(tensor: torch.Tensor, samples: int | None = None) -> torch.Tensor:
    """A tensor of zeros in the layout of another, with another number of samples."""
    size = tensor.shape if samples is None else (samples, *tensor.shape[1:])
    return torch.empty_strided(size, tensor.stride(), dtype=tensor.dtype, device="cpu").zero_()


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
