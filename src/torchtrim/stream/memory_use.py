"""How much memory is in use: of this process, of the host or the container, of a device."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch

from torchtrim.errors import Unsupported

_CGROUP = Path("/sys/fs/cgroup")
_PROC = Path("/proc")


def process_bytes() -> int:
    """Bytes of this process that are in memory (resident set). Needs Linux; elsewhere its highest so far."""
    statm = _PROC / "self/statm"
    if statm.exists():
        return int(statm.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def host_bytes() -> tuple[int, int]:
    """Bytes in use and bytes there are: of the container, where it has a limit, else of the host.

    Raises `Unsupported` where neither can be read.
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
            f"the host's memory cannot be read here ({error}); give Watermarks a measure of your own."
        ) from error


def device_bytes(device: torch.device | str) -> tuple[int, int]:
    """Bytes in use and bytes there are on a device, by whomever. Raises `Unsupported` for the CPU."""
    device = torch.device(device)
    if device.type == "cpu" or not torch.accelerator.is_available():
        raise Unsupported(
            f"{device} has no memory of its own here; watch the process or the host instead."
        )
    free, total = torch.accelerator.get_memory_info(device)
    return int(total - free), int(total)


def release_caches() -> None:
    """Give memory that torch keeps for later back to the device."""
    if torch.accelerator.is_available():
        torch.accelerator.empty_cache()
