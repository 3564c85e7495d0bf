"""Which machine this is, and where its results are kept."""

from __future__ import annotations

import json
import os
import platform
import re
import statistics
import sys
from pathlib import Path
from typing import Any

import torch

RESULTS = Path(__file__).parent / "results"
_KEEPING = {
    "MALLOC_MMAP_MAX_": "0",
    "MALLOC_TRIM_THRESHOLD_": str(2**40),
    "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1",
}


def slug() -> str:
    """The machine's folder: its processor and the number of its cores."""
    words = re.sub(r"[^a-z0-9]+", "-", _processor().lower()).strip("-")
    return f"{words}-{os.cpu_count()}-cores"


def facts() -> dict[str, Any]:
    """What a figure depends on."""
    return {
        "processor": _processor(),
        "cores": os.cpu_count(),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "threads": torch.get_num_threads(),
    }


def keep_memory(module: str) -> None:
    """Go on as a program whose malloc keeps what is freed, in large pages, as the allocators of devices do.

    By itself glibc gives large blocks back to the system, and has all in pages of 4 KiB. The page faults of
    making them again, and where small pages happen to lie, vary by more than what a plan adds, and a plan
    is not what they are due to: a Llama's step is 770 to 870 ms with small pages, 736 to 786 with large ones.
    """
    if not keeps_memory():
        arguments = [sys.executable, "-m", module, *sys.argv[1:]]
        os.execve(sys.executable, arguments, {**os.environ, **_KEEPING})


def keeps_memory() -> bool:
    """Whether malloc keeps what is freed, in large pages."""
    return all(os.environ.get(name) == value for name, value in _KEEPING.items())


def save(name: str, data: dict[str, Any]) -> Path:
    """Write `results/<machine>/<name>.json` with the machine's facts."""
    path = RESULTS / slug() / f"{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"machine": facts(), **data}, indent=1) + "\n")
    return path


def saved(name: str) -> dict[str, Any]:
    """What was saved by that name on this machine; nothing where nothing was."""
    path = RESULTS / slug() / f"{name}.json"
    return dict(json.loads(path.read_text())) if path.exists() else {}


def saved_elsewhere(name: str) -> list[dict[str, Any]]:
    """What was saved by that name on other machines."""
    files = sorted(RESULTS.glob(f"*/{name}.json"))
    return [json.loads(path.read_text()) for path in files if path.parent.name != slug()]


def with_spread(values: list[float]) -> dict[str, float]:
    """The median and half of what the middle half of the values spans."""
    low, middle, high = statistics.quantiles(values, n=4)
    return {"median": round(middle, 2), "spread": round((high - low) / 2, 2)}


def _processor() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        found = re.search(r"model name\s*:\s*(.+)", cpuinfo.read_text())
        if found:
            return found.group(1).strip()
    return platform.processor() or platform.machine()
