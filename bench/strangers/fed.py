"""Seconds of a script's step with its loader and with a batch that is there already; nothing of torchtrim.

    python fed.py STEPS FILE SCRIPT [ARGS...]

The script runs as `python` would run it. After some steps that warm it up, `STEPS` steps are clocked from one
optimizer step to the next; then every `DataLoader` gives its last batch again and again, and as many are
clocked. The medians of both go into the file.
"""

from __future__ import annotations

import json
import os
import runpy
import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

WARM = 4


class Clock:
    """Steps of the script, half of them with its loader."""

    def __init__(self, steps: int, file: Path) -> None:
        self.steps, self.file = steps, file
        self.taken: dict[bool, list[float]] = {False: [], True: []}
        self.is_fed = False
        self._last = time.perf_counter()

    def stepped(self, *_: Any) -> None:
        """A step is over."""
        now = time.perf_counter()
        own = self.taken[self.is_fed]
        own.append(now - self._last)
        self._last = now
        if len(own) < WARM + self.steps:
            return
        if self.is_fed:
            self.end()
        self.is_fed = True

    def end(self) -> None:
        """Write, and end the process with its workers."""
        loader, ready = (statistics.median(self.taken[fed][WARM:]) for fed in (False, True))
        self.file.write_text(json.dumps({"with_loader": loader, "batch_there": ready}))
        os._exit(0)


def batches_of(clock: Clock, loader: Any, given: Any) -> Iterator[Any]:
    """The loader's batches until the clock has enough of them, then the last one for ever."""
    for batch in given(loader):
        while True:
            yield batch
            if not clock.is_fed:
                break


def main() -> None:
    """Run it; the process ends at the last step."""
    from torch.optim.optimizer import register_optimizer_step_post_hook
    from torch.utils.data import DataLoader

    clock = Clock(int(sys.argv[1]), Path(sys.argv[2]))
    script = sys.argv[3]
    sys.argv = sys.argv[3:]
    sys.path[0] = str(Path(script).resolve().parent)
    given = DataLoader.__iter__
    DataLoader.__iter__ = lambda self: batches_of(clock, self, given)  # type: ignore[method-assign,assignment,return-value]
    register_optimizer_step_post_hook(clock.stepped)
    runpy.run_path(script, run_name="__main__")
    sys.exit("the script ended before it had made so many steps")


if __name__ == "__main__":
    main()
