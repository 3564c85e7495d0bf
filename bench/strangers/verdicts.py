"""Is it the loader? What `diagnose` says of two public scripts, beside what their steps take without it.

    python -m bench.strangers.verdicts --sources DIR --library DIR [--limit SECONDS]

One decodes photographs in one worker, the other has small pictures in memory and four workers. `fed.py`
clocks the step of each with its loader and with a batch that is there already, without torchtrim. A verdict
is right where `diagnose` has a TT301 exactly where the loader takes a twentieth of the step.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
import tempfile
from pathlib import Path
from typing import Any

import msgspec

from bench import machine
from bench.strangers.running import HERE, Place, Program, paths_of, prepared, programs, run
from torchtrim.analysis.loaders import SHARE

STEPS = 10
ROUNDS = 3
CHANGED: dict[str, dict[str, Any]] = {
    "imagenet": {
        "args": "photographs -a shufflenet_v2_x0_5 -b 16 -j 1 --epochs 3 --no-accel",
        "data": {"photographs": "imagenet/photographs"},
    },
    "pytorch-cifar100 shufflenetv2": {},
}


def tried(program: Program, place: Place, limit: float) -> dict[str, Any]:
    """What the steps take, and what is said of them, in turn."""
    rounds = []
    for _ in range(ROUNDS):
        one = {**_alone(program, place, limit), **_said(program, place, limit)}
        rounds.append({**one, "right": bool(one["said"]) == (one["share"] >= SHARE)})
        print(program.name, json.dumps(rounds[-1]), flush=True)
    return {
        **{key: getattr(program, key) for key in ("name", "repository", "commit", "args")},
        "rounds": rounds,
        "right": sum(one["right"] for one in rounds),
    }


def _alone(program: Program, place: Place, limit: float) -> dict[str, Any]:
    folder = prepared(program, place, "fed")
    file = folder / "fed.json"
    command = [sys.executable, str(HERE / "fed.py"), str(STEPS), str(file), program.script]
    paths = paths_of(program, place, "fed")
    ended = run([*command, *shlex.split(program.args)], folder, paths, limit)
    if not file.exists():
        sys.exit(f"{program.name}: {ended.output[-2000:]}")
    found = json.loads(file.read_text())
    return {**found, "share": max(0.0, 1 - found["batch_there"] / found["with_loader"])}


def _said(program: Program, place: Place, limit: float) -> dict[str, Any]:
    folder = prepared(program, place, "said")
    out = folder / "out"
    command = [sys.executable, "-m", "torchtrim", "diagnose", program.script, "--device", "cpu"]
    command += ["--timeout", str(limit), "--out", str(out), "--", *shlex.split(program.args)]
    ended = run(command, folder, paths_of(program, place, "said"), limit)
    if not (out / "report.json").exists():
        sys.exit(f"{program.name}: {ended.output[-2000:]}")
    report = json.loads((out / "report.json").read_text())
    found = [one for one in report["findings"] if one["code"] == "TT301"]
    return {
        "said": [one["message"] for one in found],
        "price_ms": [one["price_ms"] for one in found],
    }


def main() -> None:
    """Run, print, save."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sources", type=Path, required=True)
    parser.add_argument("--library", default="")
    parser.add_argument("--limit", type=float, default=200.0, help="seconds for each run")
    options = parser.parse_args()
    known = {one.name: one for one in programs()}
    with tempfile.TemporaryDirectory() as scratch:
        place = Place(options.sources, options.library, Path(scratch))
        rows = [
            tried(msgspec.structs.replace(known[name], **changes), place, options.limit)
            for name, changes in CHANGED.items()
        ]
    machine.save("loader-verdicts", {"programs": rows})


if __name__ == "__main__":
    main()
