"""How right is what verbs say is left, from a third of their time on: verbs on examples, in processes.

python -m bench.progress [--json] [SCRIPT ...]
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

from bench import machine

HERE = Path(__file__).parent.parent
SCRIPTS = [HERE / "examples" / "charlm.py", HERE / "tests" / "scripts" / "plain.py"]
VERBS = [
    ("diagnose",),
    ("optimize", "--memory", "70%", "--device", "cpu"),
    ("optimize", "--memory", "70%"),
    ("plan", "--memory", "70%"),
    ("estimate",),
]
SAID = re.compile(r"(\d+) of (\d+)  .*  \d+ s(?:, about (\d+) s left)?$")
RIGHT, ROUNDED = 0.3, 1.0  # the share, and the second that a line is rounded to


class Line(NamedTuple):
    """A line of progress: when it came, its phase, and what it says is left."""

    at: float
    phase: str
    left: float | None


def run(script: Path, verb: tuple[str, ...], folder: Path) -> tuple[float, list[Line]]:
    """The seconds of a verb, and its lines."""
    words = [sys.executable, "-m", "torchtrim", verb[0], str(script), *verb[1:], "--verbose"]
    begin = time.monotonic()
    lines = []
    with subprocess.Popen(
        words, cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stderr is not None
        for text in process.stderr:
            if match := SAID.search(text.strip()):
                left = float(match[3]) if match[3] else None
                lines.append(Line(time.monotonic() - begin, f"{match[1]} of {match[2]}", left))
    return time.monotonic() - begin, lines


def judge(whole: float, lines: list[Line]) -> dict[str, Any]:
    """What was said at a third of the time, beside what was left, and the share of right lines since."""
    third = whole / 3
    known = [line for line in lines if line.at <= third and line.left is not None]
    said = known[-1].left - (third - known[-1].at) if known and known[-1].left is not None else None
    later = [line for line in lines if line.at >= third and line.left is not None]
    right = [line for line in later if line.left is not None and near(line.left, whole - line.at)]
    return {
        "seconds": whole,
        "said_at_a_third": said,
        "left_at_a_third": whole - third,
        "right_at_a_third": said is not None and near(said, whole - third),
        "lines_since": len(later),
        "right_since": len(right),
        "phases": lines[-1].phase if lines else "",
    }


def near(said: float, left: float) -> bool:
    """Whether what is said is within 30 % or a second of what is left."""
    return abs(said - left) <= max(RIGHT * left, ROUNDED)


def measure(scripts: list[Path]) -> dict[str, Any]:
    """The figures of each verb on each script."""
    result = {}
    for script in scripts:
        for verb in VERBS:
            with tempfile.TemporaryDirectory() as folder:
                result[f"{' '.join(verb)} {script.name}"] = judge(*run(script, verb, Path(folder)))
    return result


def show(result: dict[str, Any]) -> None:
    """A table."""
    for name, figures in result.items():
        said = figures["said_at_a_third"]
        third = "nothing" if said is None else f"{said:.0f} s"
        print(
            f"{name:<50} {figures['seconds']:5.1f} s, phases {figures['phases']}; at a third said "
            f"{third} of {figures['left_at_a_third']:.0f} s; since then {figures['right_since']} of "
            f"{figures['lines_since']} right"
        )


def main() -> None:
    """Measure, print, save."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("scripts", nargs="*", type=Path)
    parser.add_argument("--json", action="store_true", help="print the results as JSON")
    options = parser.parse_args()
    result = measure([path.resolve() for path in options.scripts] or SCRIPTS)
    path = machine.save("progress", {"verbs": result})
    if options.json:
        print(path.read_text())
    else:
        show(result)


if __name__ == "__main__":
    main()
