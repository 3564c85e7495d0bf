"""How fast `torchtrim lint` is over an installed package, and how many of its findings hold.

python -m bench.lint [--package transformers] [--json] [--draw SEED]

Seconds are of the processor, in one process, so that a busy machine does not change them much; two
processes take half of that. Labels are of findings drawn at random, each judged by hand from the code
around it: would the host wait there if the model and what it is given are on a device? `--draw` draws
findings of another seed to be labelled.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import time
from collections import Counter
from collections.abc import Sequence
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from bench.machine import save
from torchtrim.fixes.reading.source import read_source
from torchtrim.linter import files as lint
from torchtrim.linter.text import lint_text
from torchtrim.records.finding import Finding

LABELS = Path(__file__).parent / "lint_labels.json"
DRAWN = 60


def folder_of(package: str) -> Path:
    """Where an installed package lies, without importing it."""
    spec = find_spec(package)
    if spec is None or spec.origin is None:
        raise SystemExit(f"{package} is not installed.")
    return Path(spec.origin).parent


def linted(files: Sequence[str], folder: Path) -> tuple[list[Finding], float]:
    """The findings, with paths in the package, and the seconds of the processor that they took."""
    gc.disable()
    begin = time.process_time()
    found = [one for name in files for one in lint_text(name, read_source(Path(name))[0])]
    seconds = time.process_time() - begin
    gc.enable()
    return [_within(one, folder) for one in found], seconds


def _within(finding: Finding, folder: Path) -> Finding:
    import msgspec

    return msgspec.structs.replace(finding, path=lint.relative(finding.path, str(folder)))


def draw(findings: Sequence[Finding], seed: int) -> list[Finding]:
    """Findings at random, the same for the same seed."""
    return random.Random(seed).sample(list(findings), min(DRAWN, len(findings)))


def labelled(findings: Sequence[Finding], package: str) -> dict[str, Any]:
    """How many of the labelled findings are still given, and how many of those hold."""
    labels = json.loads(LABELS.read_text())
    given = {(one.path, one.line, one.code) for one in findings}
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
    files = lint.files_of([folder])
    begin = time.perf_counter()
    together = lint.lint_files(files)
    wall = time.perf_counter() - begin
    findings, seconds = linted(files, folder)
    assert sum(len(one.findings) for one in together) == len(findings)
    fixes = Counter(one.fix.kind for one in findings if one.fix is not None)
    return {
        "package": f"{package} {version(package)}",
        "files": len(files),
        "processor_seconds_in_one_process": round(seconds, 1),
        "wall_seconds_in_two_processes": round(wall, 1),
        "findings": dict(sorted(Counter(one.code for one in findings).items())),
        "fixes": dict(sorted(fixes.items())),
        "labels": labelled(findings, package),
    }


def show(result: dict[str, Any]) -> None:
    """A line for each figure."""
    for name, value in result.items():
        print(f"{name.replace('_', ' '):<36} {value}")
    labels = result["labels"]
    if labels["labelled"]:
        false = labels["labelled"] - labels["hold"]
        print(f"{'false alarms at first sight':<36} {false} of {labels['labelled']}")


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--package", default="transformers")
    parser.add_argument("--json", action="store_true", help="write bench/results/MACHINE/lint.json")
    parser.add_argument("--draw", type=int, metavar="SEED", help="print findings to label")
    options = parser.parse_args()
    if options.draw is not None:
        folder = folder_of(options.package)
        findings, _ = linted(lint.files_of([folder]), folder)
        for one in draw(findings, options.draw):
            print(f"{one.path}:{one.line} {one.code} {one.message}")
        return
    result = measure(options.package)
    show(result)
    if options.json:
        print(save("lint", result))


if __name__ == "__main__":
    main()
