"""Peaks that torchtrim tells beside those of torch's own allocator events, and of malloc.

    python -m bench.truth [NAME...] [--json]

Each program is a loop of eight steps in `bench/truth/`. Its peak is taken five ways, each in its own process:

* `diagnose` and `optimize`, as they print it, and `estimate`;
* `events`: torch's profiler runs from the script's first line to its last. The level is the sum of its memory
  events, and the peak that after the first steps;
* `malloc`: a library loaded before libc (`LD_PRELOAD`) counts the blocks of 4 KiB and more in use.

The plan of `optimize` then runs under the last two. `saved` is what each says that it saves. What malloc has
and the events have not is held by libraries: oneDNN keeps its compiled kernels and weights in its own order.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import functools
import os
import runpy
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from bench import machine
from torchtrim import Script, ScriptFailed
from torchtrim.records.files import load_plan, plan_text
from torchtrim.records.plan import Plan
from torchtrim.records.trial import Request
from torchtrim.runner.planned_script import run_planned
from torchtrim.workflows.diagnose import diagnose_report
from torchtrim.workflows.estimate import estimate_report
from torchtrim.workflows.optimize.report import optimize_report

HERE = Path(__file__).parent / "truth"
MARK = "Optimizer.zero_grad#"
"""What torch names a range in each step; a plan would see hooks, and who calls backward."""
MIB = 2**20
_FIRST = 2
"""Ranges before the measured steps: in the first one optimizers make their state."""
COUNTER = r"""
#include <malloc.h>
#include <errno.h>
#include <stddef.h>
extern void *__libc_malloc(size_t), *__libc_calloc(size_t, size_t), *__libc_realloc(void *, size_t);
extern void *__libc_memalign(size_t, size_t), __libc_free(void *);
static long in_use, highest;
static void count(void *block, int sign) {
    long size = block ? (long)malloc_usable_size(block) : 0;
    if (size < 4096) return;
    long now = __atomic_add_fetch(&in_use, sign * size, __ATOMIC_RELAXED);
    if (now > highest) highest = now;
}
void *malloc(size_t n) { void *p = __libc_malloc(n); count(p, 1); return p; }
void *calloc(size_t n, size_t m) { void *p = __libc_calloc(n, m); count(p, 1); return p; }
void free(void *p) { count(p, -1); __libc_free(p); }
void *realloc(void *p, size_t n) {
    count(p, -1);
    void *q = __libc_realloc(p, n);
    count(q ? q : p, 1);
    return q;
}
void *memalign(size_t a, size_t n) { void *p = __libc_memalign(a, n); count(p, 1); return p; }
void *aligned_alloc(size_t a, size_t n) { return memalign(a, n); }
int posix_memalign(void **to, size_t a, size_t n) { return (*to = memalign(a, n)) || !n ? 0 : ENOMEM; }
long counted_peak(void) { long was = highest; highest = in_use; return was; }
long counted_now(void) { return in_use; }
"""


def by_events(run: Callable[[], None]) -> int:
    """The highest sum of the memory events of torch's profiler, after the first steps."""
    with in_one_thread(), torch.autograd.profiler.profile(profile_memory=True) as seen:
        run()
    results: Any = seen.kineto_results
    memory, marks = [], []
    for event in results.events():
        if event.name() == "[memory]":
            memory.append((event.start_ns(), event.nbytes()))
        elif event.name().startswith(MARK):
            marks.append(event.start_ns())
    first = sorted(marks)[_FIRST]
    level = highest = 0
    for moment, size in sorted(memory, key=lambda pair: pair[0]):
        level += size
        if moment > first:
            highest = max(highest, level)
    return highest


@contextlib.contextmanager
def in_one_thread() -> Iterator[None]:
    """Run the script's own threads where it starts them: torch sees the events of one thread alone."""
    thread = threading.Thread
    start, join = thread.start, thread.join

    def run_here(self: Any) -> None:
        own = getattr(self._target, "__module__", "") == "__main__"
        (self.run if own else functools.partial(start, self))()

    def joined(self: Any, timeout: float | None = None) -> None:
        if self.ident is not None:
            join(self, timeout)

    with patch.multiple(thread, start=run_here, join=joined):
        yield


def by_malloc(run: Callable[[], None]) -> int:
    """The most bytes in use after the first steps, above those before the script."""
    library = ctypes.CDLL(None)
    for function in (library.counted_peak, library.counted_now):
        function.restype = ctypes.c_long
    peaks: list[int] = []
    ends: Any = torch.autograd.profiler.record_function.__exit__

    def end(self: Any, *error: Any) -> None:
        ends(self, *error)
        if self.name.startswith(MARK):
            peaks.append(library.counted_peak())

    torch.autograd.profiler.record_function.__exit__ = end  # type: ignore[method-assign]
    before = library.counted_now()
    run()
    return max(*peaks[_FIRST + 1 :], library.counted_peak()) - before


def import_late() -> None:
    """Have torch import what it imports at a first step: Python code, some 6 MiB of it."""
    net = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.BatchNorm1d(8))
    optimizer = torch.optim.AdamW(net.parameters())
    torch.utils.checkpoint.checkpoint(net, torch.ones(8, 8), use_reentrant=False).sum().backward()
    optimizer.step()


def child(how: str, script: str, plan: str) -> None:
    """Measure one run of a script in this process and print the bytes on the last line."""
    torch.set_num_threads(1)
    import_late()

    def run() -> None:
        if plan:
            run_planned(Script(script), load_plan(Path(plan)))
        else:
            runpy.run_path(script, run_name="__main__")

    print("\n", {"events": by_events, "malloc": by_malloc}[how](run), flush=True)
    os._exit(0)


def counted(how: str, script: Path, plan: Path | None, counter: Path) -> int:
    """The peak of a run in a new process."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    if how == "malloc":
        environment["LD_PRELOAD"] = str(counter)
    words = [sys.executable, "-m", "bench.truth", "--child", how, str(script), str(plan or "")]
    done = subprocess.run(words, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(words)}\n{done.stderr}")
    return int(done.stdout.split()[-1])


def peaks_of(script: Path, folder: Path, counter: Path) -> dict[str, Any]:
    """One row."""
    workload = Script(str(script), device="cpu")
    found: dict[str, Any] = {
        "events": counted("events", script, None, counter),
        "malloc": counted("malloc", script, None, counter),
    }
    told = diagnose_report(workload, Request()).report.original
    found["diagnose"] = told.peak_bytes if told else None
    with contextlib.suppress(ScriptFailed):
        estimated = estimate_report(workload, Request()).report.original
        found["estimate"] = estimated.peak_bytes if estimated else None
    result = optimize_report(workload, "70%", Request())
    report = result.report
    assert report.original is not None
    found["optimize"] = report.original.peak_bytes
    if report.planned is None:
        return found
    found["planned"] = report.planned.peak_bytes
    assert isinstance(result.plan, Plan)
    path = folder / f"{script.stem}.toml"
    path.write_text(plan_text(result.plan))
    for how in ("events", "malloc"):
        found[f"planned {how}"] = counted(how, script, path, counter)
    found["techniques"] = sorted({one.name for one in result.plan.techniques})
    return found


def line_of(name: str, row: dict[str, Any]) -> str:
    """What a row comes to: differences in bytes, shares, and savings in MiB."""
    saved, by_malloc = (
        (row[one] - row[f"planned{other}"]) / MIB
        for one, other in (("optimize", ""), ("malloc", " malloc"))
    )
    apart = {
        "diagnose": row["diagnose"] - row["events"],
        "optimize": row["optimize"] - row["events"],
        "planned": row["planned"] - row["planned events"],
    }
    parts = (
        f"{name:14} {row['events'] / MIB:6.2f} MiB",
        *(f"{name} {bytes_:+d}" for name, bytes_ in apart.items()),
        f"estimate {row['estimate'] / row['events'] - 1:+.2%}"
        if "estimate" in row
        else "no estimate",
        f"libraries {(row['malloc'] - row['events']) / MIB:.2f}",
        f"saved {saved:.2f}, by malloc {by_malloc - saved:+.2f}",
        ", ".join(row["techniques"]),
    )
    return "  ".join(parts)


def main() -> None:
    """Measure the programs and print their rows."""
    parser = argparse.ArgumentParser()
    parser.add_argument("names", nargs="*")
    parser.add_argument("--json", action="store_true", help="keep the figures under bench/results")
    parser.add_argument("--child", nargs=3)
    options = parser.parse_args()
    if options.child:
        child(*options.child)
    rows = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        source, counter = folder / "counter.c", folder / "counter.so"
        source.write_text(COUNTER)
        subprocess.run(["cc", "-O2", "-shared", "-fPIC", "-o", counter, source], check=True)
        for program in options.names or sorted(path.stem for path in HERE.glob("*.py")):
            rows[program] = peaks_of(HERE / f"{program}.py", folder, counter)
            row = rows[program]
            print(line_of(program, row) if "planned" in row else f"{program} {row}", flush=True)
            if options.json:
                machine.save("truth", {**machine.saved("truth"), **rows})


if __name__ == "__main__":
    main()
