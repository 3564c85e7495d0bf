"""Public programs run dry on the emulated device, beside memory snapshots that their authors took on GPUs.

    PYTHONPATH=LIBRARIES python -m bench.against_gpus FOLDER [--one NUMBER]

FOLDER holds a checkout of each repository of `RECORDS`, as OWNER+NAME; LIBRARIES what they import (einops,
einx, jaxtyping, pandas, torchvision). Nothing of them is in this repository: a result names a record by its
SHA-256. Each script runs unmodified, with its author's arguments. Torch's `_record_memory_history` and
`_dump_snapshot` begin and end the comparison: the peak, reserved bytes, and each request of the allocator.
`TRACES` are profiler traces of a ResNet-50 instead, whose step is written here: they have the requests of its
steps, cuDNN's workspaces among them, but no total.
"""

from __future__ import annotations

import argparse
import contextlib
import gzip
import hashlib
import json
import math
import operator
import re
import statistics
import subprocess
import sys
import types
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple, SupportsIndex

import torch
from torch import nn

from bench import machine
from torchtrim.api import snapshot_report
from torchtrim.dryrun.run import dry_run
from torchtrim.emulator.device import Emulation, emulate
from torchtrim.emulator.runtime import model_named
from torchtrim.emulator.tags import HELD
from torchtrim.memory.settings import AllocatorSettings
from torchtrim.records.snapshot import SnapshotEvent, frames_of
from torchtrim.traces.snapshots.reader import read_snapshot

_OPERATOR = re.compile(r"at::_ops::(\w+)::")
_KEY = re.compile(r'\{([^{}"\n]*)\["(\w+)"\]\}')
_LONGEST_EDIT = (
    4000  # Requests that differ. Arbitrary: beyond half of a recording, nothing is aligned.
)


_rounded = AllocatorSettings().rounded


class Record(NamedTuple):
    """A snapshot, and the script and arguments that wrote it. `paths`: folders to import from."""

    repository: str
    snapshot: str
    script: str
    arguments: tuple[str, ...] = ()
    paths: tuple[str, ...] = ()
    device: str = "a100"


_MEDIUM = "--d_model=1024 --d_ff=4096 --num_layers=24 --num_heads=16 --memory-profiler=pytorch"


def _medium(context: int, pattern: str, word: str, autocast: bool) -> Record:
    return Record(
        "Wedsonlin/assignment2-systems",
        f"results/medium_{context}_{word}_memory_snapshot.pickle",
        "cs336_systems/nsys_profile.py",
        (
            *_MEDIUM.split(),
            f"--context_length={context}",
            f"--pattern={pattern}",
            f"--autocast={str(autocast).lower()}",
        ),
        ("cs336-basics", "."),
    )


RECORDS = (
    *(_medium(n, "full-training-step", "training", n >= 512) for n in (128, 256, 512, 1024)),
    *(_medium(n, "forward-only", "inference", n == 512) for n in (128, 256, 512, 1024)),
    Record(
        "MAGMA27/assignment2-systems",
        "memory_snapshot.pickle",
        "cs336_systems/benchmarking_script.py",
        paths=("cs336-basics",),
    ),
    Record(
        "silmont2000/assignment2-systems",
        "mem_snapshot.pickle",
        "cs336_systems/trace_peak_memory.py",
    ),
)
"""At the newest commits that hold both files: 87b0864, 15883f2, 133f064."""
_KINETO = "pytorch/kineto"
TRACES = tuple(
    f"tb_plugin/samples/resnet50_num_workers_{workers}/worker0.{time}.pt.trace.json.gz"
    for workers, times in (
        (0, (1623143089861, 1623143566756)),
        (4, (1623212756351, 1623213129365)),
    )
    for time in times
)
"""Steps of `tb_plugin/examples/resnet50_profiler_api.py` on a V100, at 9d1ce6a."""


class Request(NamedTuple):
    """A request of the allocator: its rounded bytes, and the operator that made it."""

    size: int
    operator: str


class Dumped(BaseException):
    """The script has written its snapshot."""


class _Log(list[tuple[int, int]]):
    """Events of the device that also keep each request, until it turns out to be none."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[Request] = []

    def append(self, event: tuple[int, int]) -> None:
        super().append(event)
        if event[1] > 0:
            held = event[0] == HELD
            name = "cuBLAS workspace" if held else _running(sys._getframe(1))
            self.made.append(Request(_rounded(event[1]), name))

    def pop(self, index: SupportsIndex = -1) -> tuple[int, int]:
        self.made.pop()
        return super().pop(index)


class Requests:
    """Collects the requests between `begin` and `end`, which replace torch's recording."""

    def __init__(self, emulation: Emulation) -> None:
        self._emulation = emulation
        self._log = emulation.tags.events = _Log()
        self.peak = self.reserved = self.before = 0

    @property
    def made(self) -> list[Request]:
        """The requests, without those of zero bytes."""
        return [one for one in self._log.made if one.size]

    def begin(self, enabled: object = "all", **_: object) -> None:
        """Begin, unless the recording is being switched off."""
        if enabled is not None:
            allocator = self._emulation.counters.settle()
            allocator.reset_peaks()
            self.before = allocator.allocated + self._emulation.workspaces.bytes
            self._log.made.clear()

    def end(self, *_: object) -> None:
        """End, and the script with it."""
        allocator = self._emulation.counters.settle()
        self.peak = allocator.peak_allocated + self._emulation.workspaces.bytes
        self.reserved = allocator.peak_reserved
        raise Dumped


def _running(frame: FrameType | None) -> str:
    """Return the name of the operator that the emulated device runs."""
    name = ""
    while frame is not None:
        func = frame.f_locals.get("func")
        if frame.f_code.co_name == "__torch_dispatch__" and hasattr(func, "_schema"):
            name = str(func._schema.name).partition("::")[2]
        frame = frame.f_back
    return name


def emulated(record: Record, folder: Path) -> Requests:
    """Run the script dry until it writes its snapshot."""
    home = folder / record.repository.replace("/", "+")
    sys.path[:0] = [str(home / path) for path in record.paths]
    script = str(home / record.script)
    sys.argv = [script, *record.arguments]
    with contextlib.ExitStack() as stack:
        emulation = stack.enter_context(emulate(model_named(record.device)))
        stack.enter_context(dry_run(str(home), owned_only=False))
        requests = Requests(emulation)
        torch.cuda.memory._record_memory_history = requests.begin
        torch.cuda.memory._dump_snapshot = torch.cuda.memory._snapshot = requests.end
        with contextlib.suppress(Dumped):
            _run(script)
    return requests


def _run(script: str) -> None:
    """Run a script; of the syntax of Python 3.12, quotes inside an f-string are made those of older ones."""
    text = _KEY.sub(r"{\1['\2']}", Path(script).read_text())
    main = types.ModuleType("__main__")
    main.__file__ = script
    sys.modules["__main__"] = main
    exec(compile(text, script, "exec"), main.__dict__)


def recorded(events: Sequence[SnapshotEvent]) -> list[Request]:
    """Return the requests of a snapshot, each with the innermost operator of its stack."""
    return [
        Request(_rounded(event.size), _operator(event))
        for event in events
        if event.action == "alloc"
    ]


def _operator(event: SnapshotEvent) -> str:
    names = [frame.name for frame in frames_of(event)]
    for name in names:
        if "getNewWorkspace" in name or "WorkspaceByHandle" in name or "getCUDABlas" in name:
            return "cuBLAS workspace"
    found = (found[1] for name in names if (found := _OPERATOR.search(name)))
    return next(found, "")


def differences(
    here: Sequence[Request],
    there: Sequence[Request],
    alike: Callable[[int, int], bool] = operator.eq,
) -> tuple[int, Counter[str]]:
    """Return how many requests are equal in size and order, and the operators of all others."""
    others: Counter[str] = Counter()
    equal = 0
    for kind, one in _edits([one.size for one in here], [one.size for one in there], alike):
        if kind == "equal":
            equal += 1
        elif kind == "here":
            others[f"only here: {here[one].operator}"] += 1
        else:
            others[f"only on the GPU: {there[one].operator}"] += 1
    return equal, others


def _edits(
    a: Sequence[int], b: Sequence[int], alike: Callable[[int, int], bool]
) -> Iterator[tuple[str, int]]:
    """Yield a shortest edit from `a` to `b`, from the end: Myers' algorithm."""
    trace: list[dict[int, int]] = []
    reach = {1: 0}
    for distance in range(min(len(a) + len(b), _LONGEST_EDIT) + 1):
        trace.append(dict(reach))
        for line in range(-distance, distance + 1, 2):
            down = line == -distance or (
                line != distance and reach.get(line - 1, -1) < reach.get(line + 1, -1)
            )
            x = reach[line + 1] if down else reach[line - 1] + 1
            while x < len(a) and x - line < len(b) and alike(a[x], b[x - line]):
                x += 1
            reach[line] = x
            if x >= len(a) and x - line >= len(b):
                yield from _walked_back(trace, len(a), len(b))
                return
    raise ValueError(f"more than {_LONGEST_EDIT} requests differ")


def _walked_back(trace: Sequence[dict[int, int]], x: int, y: int) -> Iterator[tuple[str, int]]:
    for distance in range(len(trace) - 1, -1, -1):
        reach, line = trace[distance], x - y
        down = line == -distance or (
            line != distance and reach.get(line - 1, -1) < reach.get(line + 1, -1)
        )
        before = line + 1 if down else line - 1
        begin_x = reach[before] if distance else 0
        begin_y = begin_x - before if distance else 0
        while x > begin_x + (not down) * bool(distance) and y > begin_y + down * bool(distance):
            x, y = x - 1, y - 1
            yield "equal", x
        if distance:
            yield ("there", begin_y) if down else ("here", begin_x)
        x, y = begin_x, begin_y


def compared(record: Record, folder: Path) -> dict[str, Any]:
    """One row: the record beside the dry run."""
    path = folder / record.repository.replace("/", "+") / record.snapshot
    gpu = max(snapshot_report(path).devices, key=lambda device: device.events)
    there = recorded(read_snapshot(path).device_traces[gpu.device])
    requests = emulated(record, folder)
    here = requests.made
    equal, others = differences(here, there)
    return {
        "repository": record.repository,
        "record": record.snapshot,
        "sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
        "device": record.device,
        "peak_bytes": [gpu.peak_allocated, requests.peak],
        "peak_off": _off(requests.peak, gpu.peak_allocated),
        "reserved_bytes": [gpu.evidence.recorded_peak_reserved, requests.reserved],
        "reserved_off": _off(requests.reserved, gpu.evidence.recorded_peak_reserved),
        "requests": [len(there), len(here)],
        "equal": round(equal / max(len(here), len(there)), 4),
        "others": dict(others.most_common()),
    }


class TracedStep(NamedTuple):
    """A step in a trace. `rises`: the highest above its begin, with workspaces of convolutions and without.

    `convolutions`: of each, the bytes of its workspace and those that it reads and writes.
    """

    requests: list[Request]
    rises: tuple[int, int]
    convolutions: list[tuple[int, int]]


def traced(path: Path) -> TracedStep:
    """Read the second step: torch's allocator events, each with the innermost operator around it."""
    events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    calls = [event for event in events if event.get("cat") == "Operator" and "dur" in event]
    begin, end = sorted(
        (call["ts"], call["ts"] + call["dur"]) for call in calls if call["name"].startswith(_STEP)
    )[1]
    calls = [call for call in calls if begin <= call["ts"] < end and _STEP not in call["name"]]
    changes = [
        event
        for event in events
        if event["name"] == "[memory]"
        and event["args"]["Device Type"] == 1
        and begin <= event["ts"] < end
    ]
    changes.sort(key=operator.itemgetter("ts"))
    scratch: set[int] = set()
    convolutions = []
    for call in calls:
        if call["name"].startswith("aten::cudnn_convolution") and call["args"]["Input Dims"]:
            inside = [number for number, event in enumerate(changes) if _covers(call, event)]
            sizes = [changes[number]["args"]["Bytes"] for number in inside]
            if sizes and not call["name"].endswith("convolution_backward"):
                scratch.update(inside[1:])
                handled = sum(4 * math.prod(dims) for dims in call["args"]["Input Dims"] if dims)
                convolutions.append((max(sizes[1:], default=0), handled + sizes[0]))
    requests = [
        Request(event["args"]["Bytes"], _CUDNN if number in scratch else _innermost(calls, event))
        for number, event in enumerate(changes)
        if event["args"]["Bytes"] > 0
    ]
    steps = [(number, event["args"]["Bytes"]) for number, event in enumerate(changes)]
    without = (size for number, size in steps if number not in scratch)
    rises = max(accumulate(size for _, size in steps)), max(accumulate(without))
    return TracedStep(requests, rises, convolutions)


_STEP, _CUDNN = "ProfilerStep", "cuDNN workspace"


def _covers(call: dict[str, Any], event: dict[str, Any]) -> bool:
    """Return True if an event is during a call of its thread."""
    same = str(call["tid"]) == str(event["tid"])
    return same and bool(call["ts"] <= event["ts"] <= call["ts"] + call["dur"])


def _innermost(calls: Sequence[dict[str, Any]], event: dict[str, Any]) -> str:
    around = [call for call in calls if _covers(call, event) and "::empty" not in call["name"]]
    return str(min(around, key=operator.itemgetter("dur"))["name"]) if around else ""


def _in_block(size: int, block: int) -> bool:
    """Return True if the block may have been given for a request: a rest of up to 1 MiB is not split off."""
    return size == block or (size > _MIB and 0 <= block - size <= _MIB)


_MIB = 2**20


def resnet_step() -> Requests:
    """Run three steps of the traced program dry, as torch 1.9 did, and return the third's requests."""
    from torchvision.models import resnet50

    with contextlib.ExitStack() as stack:
        requests = Requests(stack.enter_context(emulate(model_named("v100"))))
        stack.enter_context(dry_run(str(Path.cwd()), owned_only=False))
        model = resnet50().cuda()
        loss_of = nn.CrossEntropyLoss().cuda()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.001, momentum=0.9, foreach=False)
        with contextlib.suppress(Dumped):
            for number in range(3):
                if number == 2:
                    requests.begin()
                images, labels = torch.randn(32, 3, 224, 224), torch.randint(1000, (32,))
                images, labels = images.cuda(), labels.cuda()
                outputs = model(images)
                loss = loss_of(outputs, labels)
                optimizer.zero_grad(set_to_none=False)
                loss.backward()
                optimizer.step()
            requests.end()
    return requests


def compared_traces(folder: Path) -> list[dict[str, Any]]:
    """One row for each trace."""
    requests = resnet_step()
    here, rise = requests.made, requests.peak - requests.before
    rows = []
    for name in TRACES:
        path = folder / _KINETO.replace("/", "+") / name
        there = traced(path)
        equal, others = differences(here, there.requests, _in_block)
        taken = [size for size, _ in there.convolutions if size]
        rows.append(
            {
                "repository": _KINETO,
                "record": name,
                "sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
                "device": "v100",
                "rise_bytes": [*there.rises, rise],
                "rise_off": _off(rise, there.rises[0]),
                "rise_without_workspaces_off": _off(rise, there.rises[1]),
                "convolutions": len(there.convolutions),
                "workspaces": [len(taken), min(taken), max(taken)],
                "most_of_its_tensors": round(max(a / b for a, b in there.convolutions), 2),
                "requests": [len(there.requests), len(here)],
                "equal": round(equal / max(len(here), len(there.requests)), 4),
                "others": dict(others.most_common()),
            }
        )
    return rows


def _off(here: int, there: int) -> float:
    return round(here / there - 1, 5)


def summary(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The errors of all, and how many requests are equal."""
    median: Callable[[str], float] = lambda key: statistics.median(abs(row[key]) for row in rows)  # noqa: E731
    worst: Callable[[str], float] = lambda key: max(abs(row[key]) for row in rows)  # noqa: E731
    return {
        "records": len(rows),
        "programs": len({row["repository"] for row in rows}),
        "peak_off": {"median": median("peak_off"), "worst": worst("peak_off")},
        "reserved_off": {"median": median("reserved_off"), "worst": worst("reserved_off")},
        "equal": {"median": median("equal"), "least": min(row["equal"] for row in rows)},
    }


def main() -> None:
    """Compare each record in a process of its own, print, save."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--one", type=int, help="compare one record here; -1: the traces")
    options = parser.parse_args()
    folder = options.folder.resolve()
    if options.one is not None:
        found = (
            [compared(RECORDS[options.one], folder)]
            if options.one >= 0
            else compared_traces(folder)
        )
        print("\n" + json.dumps(found))
        return
    rows: list[dict[str, Any]] = []
    for number in (*range(len(RECORDS)), -1):
        words = ["-m", "bench.against_gpus", str(options.folder), "--one", str(number)]
        ended = subprocess.run(
            [sys.executable, *words], capture_output=True, text=True, check=False
        )
        if ended.returncode:
            print(f"record {number}: {ended.stderr.strip().splitlines()[-1]}")
            continue
        rows += json.loads(ended.stdout.splitlines()[-1])
        print({key: rows[-1][key] for key in rows[-1] if key.endswith(("record", "off", "equal"))})
    snapshots = [row for row in rows if "peak_off" in row]
    traces = [row for row in rows if "rise_off" in row]
    result = {"summary": summary(snapshots), "rows": snapshots, "traces": traces}
    path = machine.save("against_gpus", result)
    print(result["summary"])
    print(f"wrote {path}")


if __name__ == "__main__":
    main()
