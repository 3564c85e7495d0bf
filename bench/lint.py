"""How fast `torchtrim lint` is over installed packages, and how many of its findings hold.

python -m bench.lint [--packages transformers diffusers] [--json] [--draw SEED]

The command runs twice in a cache folder of its own: cold, and again with nothing changed. Seconds are of the
processor, in all of its processes, so that a busy machine does not change them much. Labels are of findings
drawn at random, each judged by hand from the code around it: would the host wait there if the model and what
it is given are on a device? `--draw` draws findings of the first package to be labelled.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from bench.machine import save
from torchtrim.linter import files as lint

LABELS = Path(__file__).parent / "lint_labels.json"
DRAWN = 60
Finding = dict[str, Any]


def folder_of(package: str) -> Path:
    """Where an installed package lies, without importing it."""
    spec = find_spec(package)
    if spec is None or spec.origin is None:
        raise SystemExit(f"{package} is not installed.")
    return Path(spec.origin).parent.resolve()


def linted(folder: Path, cache: str) -> tuple[list[Finding], float]:
    """The findings, with paths in the package, and the seconds of the processor that the command took."""
    command = [sys.executable, "-m", "torchtrim", "lint", str(folder), "--format", "json"]
    begin = _children()
    done = subprocess.run(
        command, env={**os.environ, "XDG_CACHE_HOME": cache}, capture_output=True, check=False
    )
    seconds = _children() - begin
    found = json.loads(done.stdout)["findings"]
    return [one | {"path": _within(one["path"], folder)} for one in found], seconds


def _children() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _within(path: str, folder: Path) -> str:
    inside = path.split(f"{folder.name}/", 1)[-1] if not path.startswith("/") else path
    return lint.relative(inside, str(folder))


def draw(findings: Sequence[Finding], seed: int) -> list[Finding]:
    """Findings at random, the same for the same seed."""
    return random.Random(seed).sample(list(findings), min(DRAWN, len(findings)))


def labelled(findings: Sequence[Finding], package: str) -> dict[str, Any]:
    """How many of the labelled findings are still given, and how many of those hold."""
    labels = json.loads(LABELS.read_text())
    given = {(one["path"], one["line"], one["code"]) for one in findings}
    known = [one for one in labels["labels"] if labels["package"] == package]
    still = [one for one in known if (one["path"], one["line"], one["code"]) in given]
    return {
        "version": labels["version"],
        "labelled": len(known),
        "hold": sum(one["holds"] for one in known),
        "still_given": len(still),
        "still_given_that_hold": sum(one["holds"] for one in still),
    }


def measure(package: str) -> dict[str, Any]:
    """What linting a package gives and costs."""
    folder = folder_of(package)
    count = len(lint.files_of([folder]))
    with tempfile.TemporaryDirectory() as cache:
        findings, cold = linted(folder, cache)
        again, warm = linted(folder, cache)
    assert findings == again
    fixes = Counter(one["fix"]["kind"] for one in findings if one["fix"])
    return {
        "package": f"{package} {version(package)}",
        "files": count,
        "cold_processor_seconds": round(cold, 1),
        "cold_processor_seconds_for_1000_files": round(cold / count * 1000, 1),
        "warm_processor_seconds": round(warm, 2),
        "findings": dict(sorted(Counter(one["code"] for one in findings).items())),
        "fixes": dict(sorted(fixes.items())),
        "labels": labelled(findings, package),
    }


def show(result: dict[str, Any]) -> None:
    """A line for each figure."""
    for name, value in result.items():
        print(f"{name.replace('_', ' '):<38} {value}")
    labels = result["labels"]
    if labels["labelled"]:
        false = labels["labelled"] - labels["hold"]
        print(f"{'false alarms at first sight':<38} {false} of {labels['labelled']}", flush=True)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--packages", nargs="+", default=["transformers", "diffusers"])
    parser.add_argument("--json", action="store_true", help="write bench/results/MACHINE/lint.json")
    parser.add_argument("--draw", type=int, metavar="SEED", help="print findings to label")
    options = parser.parse_args()
    if options.draw is not None:
        with tempfile.TemporaryDirectory() as cache:
            findings, _ = linted(folder_of(options.packages[0]), cache)
        for one in draw(findings, options.draw):
            print(f"{one['path']}:{one['line']} {one['code']} {one['message']}")
        return
    results = [measure(package) for package in options.packages]
    for result in results:
        show(result)
    if options.json:
        print(save("lint", {"packages": results}))


if __name__ == "__main__":
    main()
