"""Replays public memory snapshots of real GPUs: reserved bytes, calls of the device, addresses, settings.

    python -m bench.snapshots FOLDER [--json]

FOLDER holds the files; none is in this repository. Each is named in the results by the SHA-256 of its bytes.
The model of the allocator is given a recording's requests and its layout before the first one, and is held
against what the GPU's allocator did. Then each setting is replayed from an empty cache.
"""

from __future__ import annotations

import argparse
import hashlib
from pathlib import Path
from typing import Any

from bench import machine
from torchtrim.api import snapshot_report
from torchtrim.records.snapshot_report import DeviceSnapshot


def measured(path: Path) -> list[dict[str, Any]]:
    """One row for each device with events."""
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    devices = snapshot_report(path).devices
    return [{"sha256": digest, "bytes": path.stat().st_size, **_row(device)} for device in devices]


def _row(device: DeviceSnapshot) -> dict[str, Any]:
    seen = device.evidence
    base = device.base.peak_reserved
    return {
        "device": device.device,
        "conf": device.conf,
        "events": device.events,
        "allocations": seen.allocations,
        "same_address": seen.same,
        "device_calls": seen.recorded_device_calls,
        "device_calls_replayed": seen.device_calls,
        "peak_reserved_bytes": seen.recorded_peak_reserved,
        "peak_reserved_bytes_replayed": seen.peak_reserved,
        "peak_allocated_bytes": device.peak_allocated,
        "out_of_memory": len(device.ooms),
        "from_empty_cache_bytes": base,
        "settings": {
            tried.conf: None if tried.full else round(tried.peak_reserved / base - 1, 4)
            for tried in device.tried[1:]
        },
    }


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """How many are exact, and how often a setting helps by 1 % or more."""
    helped: dict[str, int] = {}
    for row in rows:
        for conf, change in row["settings"].items():
            helped[conf] = helped.get(conf, 0) + (change is not None and change <= -0.01)
    return {
        "recordings": len(rows),
        "that_call_the_device": sum(row["device_calls"] > 0 for row in rows),
        "reserved_exact": sum(
            row["peak_reserved_bytes"] == row["peak_reserved_bytes_replayed"] for row in rows
        ),
        "device_calls_exact": sum(
            row["device_calls"] == row["device_calls_replayed"] for row in rows
        ),
        "every_address": sum(row["allocations"] == row["same_address"] for row in rows),
        "settings_that_help": helped,
    }


def main() -> None:
    """Replay all, print, save."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--json", action="store_true", help="print the results as JSON")
    options = parser.parse_args()
    rows = [row for path in sorted(options.folder.glob("*.pickle")) for row in measured(path)]
    result = {"summary": summary(rows), "rows": rows}
    path = machine.save("snapshots", result)
    print(path.read_text() if options.json else f"{result['summary']}\nwrote {path}")


if __name__ == "__main__":
    main()
