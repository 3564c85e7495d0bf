"""How right is what verbs say is left, from a third of their time on: verbs on examples, in processes.

    python -m bench.progress [--json] [NAME ...]

The scripts are the twenty of `bench.verbs --ratios`; the constants of `torchtrim.cli.progress` were fitted on
those of `FITTED`. What is measured replaces that script's earlier figures in the saved results.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

from bench import machine, verbs

FITTED = ("bert.py", "cnn.py", "ddpm.py", "gan.py", "gpt.py", "mlp.py", "wavenet.py")
VERBS = [("optimize", "--memory", "70%", "--device", "cpu"), ("optimize", "--memory", "70%")]
SAID = re.compile(r"(\d+ of \d+|extra \d+)  .*  \d+ s(?:, about (\d+) s left)?$")
RIGHT, ROUNDED = 0.3, 1.0  # the share, and the second that a line is rounded to


class Line(NamedTuple):
    """A line of progress: when it came, its phase, and what it says is left."""

    at: float
    phase: str
    left: float | None


def run(script: str, words: tuple[str, ...], folder: Path) -> tuple[float, list[Line]]:
    """The seconds of a verb, and its lines."""
    verb = verbs.Verb(script, (*words, "--verbose"), args=verbs.RATIOS[script])
    command = verbs.command(verb, folder)
    begin = time.monotonic()
    lines = []
    with subprocess.Popen(
        command, cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stderr is not None
        for text in process.stderr:
            if match := SAID.search(text.strip()):
                left = float(match[2]) if match[2] else None
                lines.append(Line(time.monotonic() - begin, match[1], left))
    return time.monotonic() - begin, lines


def judge(whole: float, lines: list[Line]) -> dict[str, Any]:
    """What was said at a third of the time, beside what was left, and the share of right lines since."""
    third = whole / 3
    known = [line for line in lines if line.at <= third and line.left is not None]
    said = known[-1].left - (third - known[-1].at) if known and known[-1].left is not None else None
    later = [line for line in lines if line.at >= third and line.left is not None]
    right = [line for line in later if line.left is not None and near(line.left, whole - line.at)]
    return {
        "load": os.getloadavg()[0],
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


def measure(scripts: list[str]) -> dict[str, Any]:
    """The figures of each verb on each script."""
    result = {}
    for script in scripts:
        for verb in VERBS:
            with tempfile.TemporaryDirectory() as folder:
                name = f"{' '.join(verb)} {script}"
                result[name] = judge(*run(script, verb, Path(folder)))
            show(name, result[name])
    return result


def show(name: str, figures: dict[str, Any]) -> None:
    """A line of the table."""
    said = figures["said_at_a_third"]
    third = "nothing" if said is None else f"{said:.0f} s"
    print(
        f"{name:<60} {figures['seconds']:5.1f} s, phases {figures['phases']}; at a third said "
        f"{third} of {figures['left_at_a_third']:.0f} s; since then {figures['right_since']} of "
        f"{figures['lines_since']} right",
        flush=True,
    )


def main() -> None:
    """Measure, print, save."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("scripts", nargs="*", metavar="NAME", choices=[*verbs.RATIOS, []])
    parser.add_argument("--json", action="store_true", help="print the results as JSON")
    options = parser.parse_args()
    result = {
        **machine.saved("progress").get("verbs", {}),
        **measure(options.scripts or [*verbs.RATIOS]),
    }
    held = {name: one for name, one in result.items() if not name.endswith(FITTED)}
    totals = {
        "right_at_a_third": sum(one["right_at_a_third"] for one in result.values()),
        "of": len(result),
        "held_out_right_at_a_third": sum(one["right_at_a_third"] for one in held.values()),
        "held_out_of": len(held),
    }
    path = machine.save("progress", {**totals, "verbs": dict(sorted(result.items()))})
    print(path.read_text() if options.json else f"{totals}\nwrote {path}")


if __name__ == "__main__":
    main()
