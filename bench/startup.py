"""What importing torchtrim costs beyond importing torch, in fresh processes.

python -m bench.startup [--json]
"""

from __future__ import annotations

import argparse
import os
import random
import subprocess
import sys
from typing import Any

from bench import machine
from bench.machine import with_spread

ROUNDS = 9
IMPORTS = {
    "torch": "import torch",
    "torchtrim": "import torch, torchtrim",
    "torchtrim.api": "import torch, torchtrim.api, torchtrim.workflows.optimize.fitting",
    "torchtrim, without torch": "import torchtrim",
}
TIMED = "import time; begin = time.process_time(); {}; print(time.process_time() - begin)"


def seconds(statement: str) -> float:
    """Seconds of the processor that an import takes in a fresh process, from compiled files."""
    code = TIMED.format(statement)
    env = {**os.environ, "PYTHONDONTWRITEBYTECODE": ""}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, check=True, text=True, env=env
    )
    return float(done.stdout.split()[-1])


def measure(rounds: int) -> dict[str, Any]:
    """Milliseconds of each import, and those beyond torch's own in the same round."""
    times: dict[str, list[float]] = {name: [] for name in IMPORTS}
    for statement in IMPORTS.values():
        seconds(statement)
    for _ in range(rounds):
        for name in random.sample(list(IMPORTS), len(IMPORTS)):
            times[name].append(seconds(IMPORTS[name]) * 1e3)
    beyond = {
        name: [time - torch for time, torch in zip(times[name], times["torch"], strict=True)]
        for name in ("torchtrim", "torchtrim.api")
    }
    return {
        "milliseconds": {name: with_spread(values) for name, values in times.items()},
        "beyond_torch": {name: with_spread(values) for name, values in beyond.items()},
    }


def show(result: dict[str, Any]) -> None:
    """A table."""
    for title, figures in result.items():
        print(title.replace("_", " "))
        for name, figure in figures.items():
            print(f"  {name:<26} {figure['median']:8.1f} ± {figure['spread']:.1f} ms")


def main() -> None:
    """Measure, print, save."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="print the results as JSON")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    options = parser.parse_args()
    result = measure(options.rounds)
    path = machine.save("startup", {"rounds": options.rounds, **result})
    if options.json:
        print(path.read_text())
    else:
        show(result)


if __name__ == "__main__":
    main()
