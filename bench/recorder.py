"""What recording a training step costs for each operator, beside others that watch one.

    python -m bench.recorder [--json]

Times are those of the processor in the one thread that trains, so that other programs on the machine
disturb them little; and what is freed stays with the process, so that page faults do not count.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import gc
import random
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed._tools.mem_tracker import MemTracker
from torch.utils._python_dispatch import TorchDispatchMode

from bench import machine
from bench.machine import with_spread
from torchtrim.capture.allocator import CpuAllocator
from torchtrim.capture.build import Setting
from torchtrim.capture.modules import Modules
from torchtrim.capture.recorder import Recorder
from torchtrim.capture.recording import Recording
from torchtrim.capture.watch import Watcher
from torchtrim.dispatch.places import Places

WIDTHS = (16, 64, 256)
ROUNDS = 15
HERE = str(Path(__file__).parent)


class Training:
    """A transformer encoder with Adam."""

    def __init__(self, width: int) -> None:
        torch.manual_seed(0)
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, batch_first=True)
        self.model = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)
        self.optimizer = torch.optim.Adam(self.model.parameters(), 1e-4)
        self.batch = torch.randn(4, 32, width)

    def step(self) -> None:
        """One step."""
        loss = self.model(self.batch).square().mean()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


class Empty(TorchDispatchMode):
    """Passes every operator on."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def operators_only(training: Training) -> Iterator[None]:
    """Our recorder without the memory profiler."""
    recorder = Recorder(Places(HERE))
    recorder.track(training.model.parameters())
    recorder.start(scan=False)
    try:
        yield
    finally:
        recorder.stop()


@contextlib.contextmanager
def recording(training: Training) -> Iterator[None]:
    """Our recorder with all that it does: modules are watched, the memory profiler runs, and operators
    are marked in it."""
    modules = Modules()
    modules.add_root(training.model)
    setting = Setting("cpu", "bench", HERE)
    running = Recording(modules, Places(HERE), setting, CpuAllocator())
    watcher = Watcher(running)
    watcher.optimizers.append(training.optimizer)
    with watcher:
        running.begin([training.optimizer], scan=False)
        try:
            yield
        finally:
            running.abandon()


@contextlib.contextmanager
def memory_only(_: Training) -> Iterator[None]:
    """What runs in the steps that are timed: the memory profiler alone."""
    allocator = CpuAllocator()
    allocator.start()
    try:
        yield
    finally:
        allocator.stop()


@contextlib.contextmanager
def mem_tracker(training: Training) -> Iterator[None]:
    """torch's own tracker of memory."""
    tracker = MemTracker()
    tracker.track_external(training.model, training.optimizer, training.batch)
    with tracker:
        yield


def profiler(_: Training) -> Any:
    """torch's own profiler with stacks and memory."""
    return torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU],
        with_stack=True,
        profile_memory=True,
        acc_events=True,
    )


WATCHERS: dict[str, Callable[[Training], Any]] = {
    "eager": lambda _: contextlib.nullcontext(),
    "empty mode": lambda _: Empty(),
    "recorder, operators only": operators_only,
    "recorder": recording,
    "memory profiler only": memory_only,
    "MemTracker": mem_tracker,
    "torch.profiler": profiler,
}


def operators_of(training: Training) -> int:
    """How many operators a step has."""
    recorder = Recorder(Places(HERE))
    recorder.start(scan=False)
    training.step()
    recorder.stop()
    return len(recorder.operators)


def seconds(training: Training, watcher: Callable[[Training], Any]) -> float:
    """Seconds of the processor for one step, watched. Starting and stopping to watch do not count."""
    gc.collect()
    with watcher(training):
        begin = time.thread_time()
        training.step()
        return time.thread_time() - begin


def measure(width: int, rounds: int) -> dict[str, Any]:
    """Each watcher's cost over eager, in microseconds for each operator, at one width."""
    training = Training(width)
    for _ in range(3):
        training.step()
    times: dict[str, list[float]] = {name: [] for name in WATCHERS}
    for _ in range(rounds):
        for name in random.sample(list(WATCHERS), len(WATCHERS)):
            times[name].append(seconds(training, WATCHERS[name]))
    count = operators_of(training)
    eager = statistics.median(times["eager"])
    return {
        "width": width,
        "operators": count,
        "eager_ms": eager * 1e3,
        "microseconds_per_operator": {
            name: with_spread([(t - eager) / count * 1e6 for t in taken])
            for name, taken in times.items()
        },
        "times_eager": {name: statistics.median(t) / eager for name, t in times.items()},
    }


def show(results: list[dict[str, Any]]) -> None:
    """A table."""
    for result in results:
        print(
            f"width {result['width']}: {result['operators']} operators, "
            f"eager {result['eager_ms']:.1f} ms"
        )
        for name, cost in result["microseconds_per_operator"].items():
            print(
                f"  {name:<26} {cost['median']:7.1f} ± {cost['spread']:4.1f} us an operator, "
                f"{result['times_eager'][name]:5.2f}x"
            )


def keep_freed_memory() -> None:
    """Tell glibc's malloc to give nothing back to the system."""
    trim_threshold, mmap_threshold = -1, -3
    with contextlib.suppress(OSError, AttributeError):
        libc = ctypes.CDLL(None)
        libc.mallopt(trim_threshold, 1 << 30)
        libc.mallopt(mmap_threshold, 1 << 30)


def main() -> None:
    """Measure, print, save."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="print the results as JSON")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    keep_freed_memory()
    results = [measure(width, options.rounds) for width in WIDTHS]
    path = machine.save("recorder", {"rounds": options.rounds, "widths": results})
    if options.json:
        print(path.read_text())
    else:
        show(results)


if __name__ == "__main__":
    main()
