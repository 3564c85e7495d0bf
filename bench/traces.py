"""What reading a saved trace costs and how well its replay fits: one line for each trace.

python -m bench.traces [FOLDER]

Each trace is analysed in a process of its own, so that its peak memory is its own; 220 MB of it are torch,
which only the benchmark imports. The last two repeat a real trace until it has 240,000 events: the largest,
and the one that takes longest an event. `kept_ms` is waiting that nothing in the trace explains, which the
replay takes as given.
"""

from __future__ import annotations

import gzip
import json
import multiprocessing
import re
import statistics
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

from bench.machine import save
from torchtrim.traces.analysis import analyse
from torchtrim.traces.build import build
from torchtrim.traces.reader import read_trace

_ROOT = Path(__file__).parents[1]
_FOLDERS = (_ROOT.parent / "shared" / "data" / "traces", _ROOT / "tests" / "data" / "traces")
_EVENTS = 240_000


def measure(path: Path) -> dict[str, Any]:
    """Seconds, megabytes, counts and the replay's error of one trace."""
    begin = time.perf_counter()
    trace = read_trace(path)
    read = time.perf_counter()
    report = analyse(trace)
    done = time.perf_counter()
    program = build(trace, {})
    kept = sum(a.extra for step in program.steps for a in step.launches)
    kept += sum(step.outside for step in program.steps)
    error = None if report.replay_ms is None else report.replay_ms / report.span_ms - 1
    return {
        "events": report.events,
        "read_seconds": round(read - begin, 3),
        "analyse_seconds": round(done - read, 3),
        "peak_mb": _peak_mb(),
        "sync_calls": report.sync_calls,
        "blocking_copies": report.blocking_copies,
        "device_syncs": sum(s.count for s in report.device_syncs) + report.profiler_syncs,
        "span_ms": report.span_ms,
        "kept_ms": round(kept / 1e3, 3),
        "replay_error": None if error is None else round(error, 5),
        "top_wait_ms": report.sites[0].wait_ms if report.sites else 0.0,
        "top_saves_alone_ms": report.sites[0].saves_alone_ms if report.sites else 0.0,
        "best_set_saves_ms": report.sets[0].saves_ms if report.sets else 0.0,
        "bound": report.bound,
    }


def _peak_mb() -> int:
    """The highest resident memory of this process; what rusage tells would include its parent's."""
    status = Path("/proc/self/status").read_text()
    return int(re.search(r"VmHWM:\s+(\d+)", status)[1]) // 1024  # type: ignore[index]


def alone(path: Path) -> dict[str, Any]:
    """The same, in a new process."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=context) as pool:
        return pool.submit(measure, path).result()


def compared(found: dict[str, Any], told: dict[str, Any]) -> dict[str, Any]:
    """The measured, with whether its counts are those that the manifest tells."""
    pageable = sum(count for kind, count in told["memcpy"].items() if "Pageable" in kind)
    right = (
        found["sync_calls"] == told["sync_calls"]
        and found["blocking_copies"] == pageable
        and found["device_syncs"] == told["device_sync_calls"]
    )
    return {**found, "as_counted": right}


def repeated(path: Path, into: Path, events: int = _EVENTS) -> Path:
    """A trace of so many events: the given one again and again, later and with other numbers."""
    document = json.loads(gzip.decompress(path.read_bytes()))
    once = [event for event in document["traceEvents"] if event.get("ph") == "X"]
    begin = min(event["ts"] for event in once)
    length = max(event["ts"] + event["dur"] for event in once) - begin
    every: list[dict[str, Any]] = []
    while len(every) < events:
        round_ = len(every) // len(once)
        every += [_later(event, round_ * length, round_ * 10**7) for event in once]
    document["traceEvents"] = every[:events]
    into.write_bytes(gzip.compress(json.dumps(document).encode(), 3))
    return into


def _later(event: dict[str, Any], by: float, number: int) -> dict[str, Any]:
    args = dict(event.get("args", {}))
    for name in ("correlation", "External id"):
        if isinstance(args.get(name), int):
            args[name] += number
    return {**event, "ts": event["ts"] + by, "args": args}


def _seconds(one: dict[str, Any]) -> float:
    return float(one["read_seconds"] + one["analyse_seconds"])


def main() -> None:
    """Measure, print and save."""
    given = [Path(word) for word in sys.argv[1:]]
    folder = next(path for path in (*given, *_FOLDERS) if path.exists())
    manifest = json.loads((folder / "manifest.json").read_text())
    found = {}
    for name, told in manifest.items():
        if (folder / name).exists():
            found[name] = compared(alone(folder / name), told)
            print(name, found[name], flush=True)
    real = [name for name in found if found[name]["events"] > 10_000]
    largest = max(real, key=lambda name: found[name]["events"])
    slowest = max(real, key=lambda name: _seconds(found[name]) / found[name]["events"])
    with tempfile.TemporaryDirectory() as scratch:
        for kind, name in (("largest", largest), ("slowest", slowest)):
            path = repeated(folder / name, Path(scratch) / "long.json.gz")
            found[f"240,000 events of the {kind}"] = {"of": name, **alone(path)}
            print(found[f"240,000 events of the {kind}"], flush=True)
    told = [one for one in found.values() if "as_counted" in one]
    errors = [abs(one["replay_error"]) for one in told if one["replay_error"] is not None]
    summary = {
        "replay_error_median": round(statistics.median(errors), 5),
        "replay_error_worst": round(max(errors), 5),
        "replayed": f"{len(errors)} of {len(told)}",
        "as_counted": all(one["as_counted"] for one in told),
    }
    print(summary)
    save("traces", {"summary": summary, "traces": found})


if __name__ == "__main__":
    main()
