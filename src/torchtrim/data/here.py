"""What this machine has for a loader."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import torch


def cores_here() -> int:
    """Cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def has_device() -> bool:
    """Whether there is a device that batches are copied to."""
    return torch.accelerator.is_available()


def free_bytes() -> int:
    """Free bytes for batches: the machine's, or its shared memory's if that is less; 0 if unknown."""
    found = []
    with contextlib.suppress(OSError, ValueError):
        text = Path("/proc/meminfo").read_text()
        (line,) = (line for line in text.splitlines() if line.startswith("MemAvailable:"))
        found.append(int(line.split()[1]) * 1024)
    with contextlib.suppress(OSError):
        shared = os.statvfs("/dev/shm")
        found.append(shared.f_bavail * shared.f_frsize)
    return min(found, default=0)
