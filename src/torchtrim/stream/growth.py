"""Tell unbounded growth from filling up, by sizes sampled over a stream, and read memory in use.

A bounded state grows too until it is full. So growth counts only if it continues through the second half
of the frames and sizes never fall.
"""

from __future__ import annotations

import itertools
import os
import sys
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from torchtrim.errors import Unsupported
from torchtrim.stream.sessions import SESSIONS

_CGROUP = Path("/sys/fs/cgroup")
_PROC = Path("/proc")


def process_bytes() -> int:
    """Return this process's resident set size in bytes (its peak so far on systems other than Linux)."""
    statm = _PROC / "self/statm"
    if statm.exists():
        return int(statm.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def host_bytes() -> tuple[int, int]:
    """Return bytes in use and total bytes of the container if it has a limit, else of the host.

    Raises `Unsupported` if neither can be read.
    """
    try:
        limit = (_CGROUP / "memory.max").read_text().strip()
        if limit != "max":
            return int((_CGROUP / "memory.current").read_text()), int(limit)
    except OSError:
        pass
    try:
        lines = (_PROC / "meminfo").read_text().splitlines()
        amounts = {line.split(":")[0]: int(line.split()[1]) * 1024 for line in lines}
        return amounts["MemTotal"] - amounts["MemAvailable"], amounts["MemTotal"]
    except (OSError, KeyError, ValueError) as error:
        raise Unsupported(
            f"cannot read the host's memory here ({error}); pass your own measure to Watermarks."
        ) from error


def device_bytes(device: torch.device | str) -> tuple[int, int]:
    """Return bytes in use (by any process) and total bytes of a device. Raises `Unsupported` for the CPU."""
    device = torch.device(device)
    if device.type == "cpu" or not torch.accelerator.is_available():
        raise Unsupported(
            f"{device} has no separate memory here; watch the process or the host instead."
        )
    free, total = torch.accelerator.get_memory_info(device)
    return int(total - free), int(total)


def release_caches() -> None:
    """Return the memory cached by torch's allocator to the device."""
    if torch.accelerator.is_available():
        torch.accelerator.empty_cache()


LEAST_FRAMES = 6  # Two halves of three frames, so that each has two differences.
_LEAST_SHARE = 0.25  # Arbitrary: a state that fills up to a bound slows down more than that.
_BOUND = {"Objects", "Records"}
_CACHES = {"DynamicCache", "DynamicLayer"}


class SizeSample(NamedTuple):
    """A size, in bytes or entries, at the end of a frame."""

    frame: int
    size: int


def keeps_growing(samples: Sequence[SizeSample]) -> bool:
    """True if sizes never fall, and the second half grows at least a quarter as fast as the first."""
    if len(samples) < 3 or any(b.size < a.size for a, b in itertools.pairwise(samples)):
        return False
    half = (samples[0].frame + samples[-1].frame) / 2
    middle = min(range(1, len(samples) - 1), key=lambda n: abs(samples[n].frame - half))
    first, second = per_frame(samples[: middle + 1]), per_frame(samples[middle:])
    return second > 0 and second >= _LEAST_SHARE * first


def per_frame(samples: Sequence[SizeSample]) -> float:
    """Return the mean growth per frame from the first sample to the last, or 0 for fewer than two."""
    if len(samples) < 2 or samples[-1].frame <= samples[0].frame:
        return 0.0
    rise = samples[-1].size - samples[0].size
    return rise / (samples[-1].frame - samples[0].frame)


def looks_at(frame: int) -> bool:
    """True if sizes are sampled at the end of this frame, counted from 1.

    Samples become sparser, so a stream of any length gets about ten, at least four of them in its last two
    thirds.
    """
    look = 2
    while look < frame:
        look = max(look + 2, int(look * 1.35))
    return look == frame


def settled(samples: Sequence[SizeSample]) -> Sequence[SizeSample]:
    """Return the samples of the last two thirds of the frames; at least three if there are."""
    last = samples[-1].frame if samples else 0
    late = [one for one in samples if 3 * one.frame >= last]
    return late if len(late) >= 3 else samples[-3:]


def adapter_for(name: str, classes: Collection[str]) -> str:
    """Return the name of the `torchtrim.stream` function that bounds this state, or an empty string.

    `classes` names the types of the objects on the path to it.
    """
    if set(SESSIONS).intersection(classes):
        return "" if _BOUND.intersection(classes) else "bound_session"
    if "cond_frame_outputs" in name:
        return "" if _BOUND.intersection(classes) else "bound_state"
    return "sink_cache" if _CACHES.intersection(classes) else ""
