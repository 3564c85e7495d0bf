"""What the emulated device costs for each operator, alone and with the recorder, over eager on the CPU.

    python -m bench.emulated

The step is that of `bench.recorder`, without dropout and with the optimizer that takes all parameters at
once, since a GPU runs both otherwise than the CPU does. Times are those of the processor in the thread
that trains; each round takes the ways in another order, with a model of their own.
"""

from __future__ import annotations

import contextlib
import random
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from bench.machine import save, with_spread
from bench.recorder import HERE, WIDTHS, Training, keep_freed_memory
from torchtrim.capture.allocator import allocator_for
from torchtrim.capture.build import Setting
from torchtrim.capture.modules import Modules
from torchtrim.capture.recording import Recording
from torchtrim.capture.watch import Watcher
from torchtrim.dispatch.places import Places
from torchtrim.emulator import emulate

ROUNDS = 15
STEPS = 3


class SameOperators(Training):
    """A training whose operators are the same on the CPU and on a GPU."""

    def __init__(self, width: int) -> None:
        super().__init__(width)
        for module in self.model.modules():
            if hasattr(module, "dropout") and isinstance(module.dropout, float):
                module.dropout = 0.0
            elif isinstance(module, nn.Dropout):
                module.p = 0.0
        self.optimizer = torch.optim.Adam(self.model.parameters(), 1e-4, foreach=True)


class OnDevice(SameOperators):
    """The same training on the device."""

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.model.cuda()
        self.batch = self.batch.cuda()


def eager(width: int) -> tuple[float, int]:
    """Seconds of a step on the CPU."""
    return _seconds(SameOperators(width), contextlib.nullcontext), 0


def emulated(width: int) -> tuple[float, int]:
    """Seconds of a step on the emulated device."""
    with emulate():
        return _seconds(OnDevice(width), contextlib.nullcontext), 0


def recorded(width: int) -> tuple[float, int]:
    """Seconds of a step that is recorded on the emulated device, and its operators."""
    with emulate():
        training = OnDevice(width)
        counts: list[int] = []

        @contextlib.contextmanager
        def recording() -> Iterator[None]:
            modules = Modules()
            modules.add_root(training.model)
            device = "emulated"
            running = Recording(
                modules, Places(HERE), Setting(device, "bench", HERE), allocator_for(device)
            )
            watcher = Watcher(running)
            watcher.optimizers.append(training.optimizer)
            with watcher:
                running.begin([training.optimizer], scan=False)
                try:
                    yield
                finally:
                    counts.append(len(running.recorder.operators))
                    running.abandon()

        return _seconds(training, recording), counts[-1]


WAYS: dict[str, Callable[[int], tuple[float, int]]] = {
    "eager": eager,
    "emulated": emulated,
    "emulated and recorded": recorded,
}


def _seconds(training: Training, watched: Callable[[], Any]) -> float:
    """The fastest of some steps after two that are not counted."""
    for _ in range(2):
        training.step()
    taken = []
    for _ in range(STEPS):
        with watched():
            begin = time.thread_time()
            training.step()
            taken.append(time.thread_time() - begin)
    return min(taken)


def measure(width: int) -> dict[str, Any]:
    """Each way's cost over eager, in microseconds for each operator, at one width."""
    times: dict[str, list[float]] = {name: [] for name in WAYS}
    count = 0
    for _ in range(ROUNDS):
        for name in random.sample(list(WAYS), len(WAYS)):
            seconds, operators = WAYS[name](width)
            times[name].append(seconds)
            count = max(count, operators)
    base = statistics.median(times["eager"])
    return {
        "width": width,
        "operators": count,
        "eager_ms": base * 1e3,
        "microseconds_per_operator": {
            name: with_spread([(t - base) / count * 1e6 for t in taken])
            for name, taken in times.items()
        },
        "times_eager": {name: statistics.median(t) / base for name, t in times.items()},
    }


def main() -> None:
    """Measure, print, save."""
    torch.set_num_threads(1)
    keep_freed_memory()
    results = [measure(width) for width in WIDTHS]
    save("emulated", {"rounds": ROUNDS, "widths": results})
    for result in results:
        print(f"width {result['width']}: {result['operators']} operators")
        for name, cost in result["microseconds_per_operator"].items():
            print(
                f"  {name:<22} {cost['median']:6.1f} ± {cost['spread']:4.1f} us an operator, "
                f"{result['times_eager'][name]:5.2f}x"
            )


if __name__ == "__main__":
    main()
