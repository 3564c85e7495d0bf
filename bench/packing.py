"""Heights of packings against the bound and against other packers, on public instances.

python -m bench.packing [FOLDER] [--json] [--save]

FOLDER holds `A.1048576.csv` and others of google/minimalloc: benchmarks/challenging (Apache-2.0), and
`resnet50.csv`, `pangu_2.6B.csv`, `S_1.csv` and others of cappadokes/idealloc: benchmarks (MIT); whatever
it holds is packed. Without one, squares that were cut into buffers are.
Greedy-by-size is that of TFLite's simple_memory_arena.cc, greedy-by-breadth that of Pisarchyk and Lee (arXiv
2001.03288): moments in the order of the bytes alive then, the buffers of each the largest first. Both are
written here anew. MiniMalloc is not on the package index; where `minimalloc` is on the path it is run with
the capacity in the file's name, or the bound, else its column is empty.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.machine import save
from torchtrim.memory.packing import Buffer, pack, packer, table, why_invalid

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

from memory.packing.instances import cut

_MINIMALLOC_SECONDS = 300
_FEW = 5000


def tightest_gaps(order: Sequence[Buffer]) -> int:
    """The height where buffers are placed in this order, each into its tightest gap."""
    placed: list[tuple[int, int, int, int]] = []
    height = 0
    for buffer in order:
        top, best, least = 0, -1, None
        for start, end, lower, upper in placed:
            if lower < buffer.upper and upper > buffer.lower:
                gap = start - top
                if gap >= buffer.size and (least is None or gap < least):
                    best, least = top, gap
                top = max(top, end)
        offset = top if least is None else best
        placed.append((offset, offset + buffer.size, buffer.lower, buffer.upper))
        placed.sort()
        height = max(height, offset + buffer.size)
    return height


def by_size(buffers: Sequence[Buffer]) -> int:
    """TFLite's greedy-by-size."""
    return tightest_gaps(sorted(buffers, key=lambda b: -b.size))


def by_breadth(buffers: Sequence[Buffer]) -> int:
    """Greedy-by-breadth: the moments with the most bytes alive first."""
    alive = {t: [b for b in buffers if b.lower <= t < b.upper] for t in {b.lower for b in buffers}}
    moments = sorted(alive, key=lambda t: (-sum(b.size for b in alive[t]), t))
    order = {b.id: b for t in moments for b in sorted(alive[t], key=lambda b: -b.size)}
    return tightest_gaps(list(order.values()))


def minimalloc(path: Path, capacity: int) -> dict[str, Any] | None:
    """What MiniMalloc finds under this capacity; None where it is not installed."""
    program = shutil.which("minimalloc")
    if program is None:
        return None
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out.csv"
        words = [program, f"--capacity={capacity}", f"--input={path}", f"--output={out}"]
        begin = time.perf_counter()
        try:
            subprocess.run(words, check=True, capture_output=True, timeout=_MINIMALLOC_SECONDS)
        except (subprocess.SubprocessError, OSError):
            return {"height": None, "seconds": round(time.perf_counter() - begin, 2)}
        took = time.perf_counter() - begin
        read = table.read(out)
        at = list(read.columns).index("offset")
        height = max(int(r[at]) + b.size for r, b in zip(read.rows, read.buffers, strict=True))
    return {"height": height, "seconds": round(took, 2)}


def measure(path: Path) -> dict[str, Any]:
    """All packers on one file. Seconds are of the wall, CPU seconds of this process."""
    buffers = table.read(path).buffers
    ours = _timed(buffers)
    found = {"buffers": len(buffers), "lower_bound": ours["lower_bound"], "torchtrim": ours}
    found["torchtrim, greedy orders"] = _timed(buffers, seconds=0)
    if len(buffers) < _FEW:
        found["torchtrim, no numba"] = _without_numba(buffers)
        found["greedy by size"] = {"height": by_size(buffers)}
        found["greedy by breadth"] = {"height": by_breadth(buffers)}
    named = path.name.split(".")
    capacity = int(named[1]) if len(named) == 3 and named[1].isdigit() else found["lower_bound"]
    found["minimalloc"] = minimalloc(path, capacity)
    return found


def _without_numba(buffers: Sequence[Buffer]) -> dict[str, Any]:
    installed = packer.can_compile
    packer.can_compile = lambda: False
    try:
        return _timed(buffers)
    finally:
        packer.can_compile = installed


def _timed(buffers: Sequence[Buffer], seconds: float | None = None) -> dict[str, Any]:
    begin, used = time.perf_counter(), time.process_time()
    packing = pack(buffers, seconds=seconds)
    found = {
        "height": packing.height,
        "optimal": packing.optimal,
        "seconds": round(time.perf_counter() - begin, 2),
        "cpu_seconds": round(time.process_time() - used, 2),
        "lower_bound": packing.lower_bound,
    }
    assert why_invalid(buffers, packing.offsets) is None
    return found


def _squares(folder: Path) -> Path:
    for cuts in (50, 150):
        rows = [f"{b.id},{b.lower},{b.upper},{b.size}" for b in cut(cuts, cuts)]
        text = "\n".join(["id,lower,upper,size", *rows, ""])
        (folder / f"square-{cuts}.1024.csv").write_text(text)
    return folder


def _row(name: str, found: dict[str, Any]) -> str:
    cells = [f"{name:<20}", f"{found['lower_bound']:>14}"]
    for who, one in found.items():
        if isinstance(one, dict) and one.get("height"):
            took = f" {one['cpu_seconds']:.1f}s" if "cpu_seconds" in one else ""
            cells.append(f"{who} {one['height'] / found['lower_bound']:.4f}{took}")
    return "  ".join(cells)


def main() -> None:
    """Measure, print and save."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, nargs="?", help="where the instances are")
    parser.add_argument("--json", action="store_true", help="print the results as JSON")
    parser.add_argument("--save", action="store_true", help="keep them under bench/results")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = options.folder or _squares(Path(scratch))
        instances: dict[str, Any] = {}
        for path in sorted(folder.glob("*.csv")):
            instances[path.name] = measure(path)
            if not options.json:
                print(_row(path.name, instances[path.name]), flush=True)
    if options.json:
        print(json.dumps(instances))
    if options.save:
        save("packing", {"instances": instances})


if __name__ == "__main__":
    main()
