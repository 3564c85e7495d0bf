"""Builds profiler traces for tests, event by event. Times in microseconds.

made = Recording()
made.launch(100, 5, kernel=(110, 50))
made.call("cudaStreamSynchronize", 105, 60)
trace = made.trace(tmp_path)
"""

from __future__ import annotations

import gzip
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torchtrim.records.trace import Trace
from torchtrim.traces.reader import read_trace

PID, MAIN, BACKWARD = 100, 100, 200
BASE = 1_700_000_000_000.0
PAGEABLE = "Memcpy DtoH (Device -> Pageable)"


@dataclass
class Recording:
    """A trace in the making; `events` are the file's."""

    events: list[dict[str, Any]] = field(default_factory=list)
    rank: int | None = None
    _number: int = 0

    def event(
        self,
        cat: str,
        name: str,
        ts: float,
        dur: float,
        *,
        tid: int | str = MAIN,
        pid: int | str = PID,
        **args: Any,
    ) -> None:
        """Any event."""
        self.events.append(
            {
                "ph": "X",
                "cat": cat,
                "name": name,
                "pid": pid,
                "tid": tid,
                "ts": BASE + ts,
                "dur": dur,
                "args": args,
            }
        )

    def op(self, name: str, ts: float, dur: float, *, tid: int = MAIN, **args: Any) -> None:
        """An operator; `sequence`, `forward_thread` and `stack` become the profiler's words."""
        words = {
            "sequence": "Sequence number",
            "forward_thread": "Fwd thread id",
            "stack": "Call stack",
        }
        renamed = {words.get(key, key): value for key, value in args.items()}
        self.event("cpu_op", name, ts, dur, tid=tid, **renamed)

    def frame(self, name: str, ts: float, dur: float, *, tid: int = MAIN) -> None:
        """A Python function."""
        self.event("python_function", name, ts, dur, tid=tid)

    def annotation(self, name: str, ts: float, dur: float, *, tid: int = MAIN) -> None:
        """A range that the program marked."""
        self.event("user_annotation", name, ts, dur, tid=tid)

    def call(self, name: str, ts: float, dur: float, *, tid: int = MAIN) -> int:
        """A call of the runtime; returns its correlation number."""
        self._number += 1
        self.event("cuda_runtime", name, ts, dur, tid=tid, correlation=self._number)
        return self._number

    def activity(
        self, name: str, ts: float, dur: float, number: int | None, *, stream: int = 7
    ) -> None:
        """Work of the device that a call launched."""
        cat = {"Memcpy": "gpu_memcpy", "Memset": "gpu_memset"}.get(name[:6], "kernel")
        self.event(
            cat, name, ts, dur, pid=0, tid=stream, device=0, stream=stream, correlation=number
        )

    def launch(
        self,
        ts: float,
        dur: float,
        *,
        kernel: tuple[float, float],
        stream: int = 7,
        tid: int = MAIN,
        call: str = "cudaLaunchKernel",
        name: str = "gemm",
    ) -> None:
        """A call and the kernel or copy that it launches, given by start and duration."""
        self.activity(name, *kernel, self.call(call, ts, dur, tid=tid), stream=stream)

    def read(self, ts: float, until: float, *, at: float, dur: float = 2.0, **where: Any) -> None:
        """A copy to pageable memory as `.to("cpu")` makes it: it blocks, and a synchronization follows."""
        tid = where.get("tid", MAIN)
        self.launch(
            ts, until - ts - 4, kernel=(at, dur), call="cudaMemcpyAsync", name=PAGEABLE, **where
        )
        self.call("cudaStreamSynchronize", until - 3, 3, tid=tid)

    def document(self) -> dict[str, Any]:
        """The file's contents."""
        found: dict[str, Any] = {
            "schemaVersion": 1,
            "deviceProperties": [{"id": 0, "name": "NVIDIA H100"}],
            "traceEvents": self.events,
        }
        if self.rank is not None:
            found["distributedInfo"] = {"rank": self.rank}
        return found

    def write(self, path: Path) -> Path:
        """Write the file, compressed where the name says so."""
        data = json.dumps(self.document()).encode()
        path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
        return path

    def trace(self, folder: Path) -> Trace:
        """The trace, written and read."""
        return read_trace(self.write(folder / "trace.json"))


def training(waits: int = 3, kernel: float = 400.0) -> Recording:
    """A loop that launches ten kernels and reads a number back, whose wait takes the host's place."""
    made = Recording()
    host, device = 0.0, 0.0
    for step in range(waits):
        made.annotation(f"ProfilerStep#{step}", host, 10 * 20 + 10 * kernel + 100)
        for _ in range(10):
            device = max(device + 1, host + 8)
            made.launch(host, 5, kernel=(device, kernel))
            device += kernel
            host += 20
        made.frame("train.py(10): step", host - 1, device - host + 40)
        made.op("aten::item", host, device - host + 20)
        made.op("aten::_local_scalar_dense", host + 1, device - host + 15)
        made.read(host + 2, device + 10, at=device + 1)
        host = device + 60
        device += 3
    return made
