"""How long the verbs take on whole scripts, beside the script alone: seconds of a person's time.

    python -m bench.verbs [NAME...] [--rounds N] [--json]
    python -m bench.verbs --ratios [--only WORD] [SCRIPT...] [--rounds N] [--json]

Each verb is the command line in a new process, in an empty folder, on a copy of the script. The rounds are
interleaved. `script` is one that trains for about six seconds on two cores. The demo is segmentation and
charlm in a row, as in `make demo`.

`--ratios` has each verb's seconds beside its script's own, for about as many steps as a verb runs it; each
round runs the script and its verbs. What is above a goal's constant counts against its ratio.
"""

from __future__ import annotations

import argparse
import os
import random
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

from bench import machine

EXAMPLES = Path(__file__).parents[1] / "examples"
OWN = Path(__file__).parent / "ratios"
SIX_SECONDS = """
import torch
from torch import nn

torch.manual_seed(0)
layer = nn.TransformerEncoderLayer(128, 4, 512, batch_first=True)
model = nn.Sequential(nn.TransformerEncoder(layer, 4, enable_nested_tensor=False), nn.Linear(128, 64))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for step in range(30):
    batch = torch.randn(16, 96, 128)
    loss = model(batch).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 10 == 0:
        print(step, loss.item())
"""


class Verb(NamedTuple):
    """One command: of which script, and at most how many seconds it is to take. `args` are the script's."""

    script: str
    words: tuple[str, ...]
    at_most: float | None = None
    args: tuple[str, ...] = ()


VERBS = {
    "script": Verb("six_seconds.py", ()),
    "script diagnose": Verb("six_seconds.py", ("diagnose", "--device", "cpu"), 8.0),
    "script optimize": Verb(
        "six_seconds.py", ("optimize", "--memory", "80%", "--device", "cpu"), 13.0
    ),
    "segmentation": Verb("segmentation.py", ("--steps", "5")),
    "segmentation optimize": Verb("segmentation.py", ("optimize", "--memory", "60%"), 60.0),
    "segmentation optimize --fix": Verb("segmentation.py", ("optimize", "--fix"), 90.0),
    "charlm": Verb("charlm.py", ("--steps", "5")),
    "charlm optimize": Verb("charlm.py", ("optimize", "--memory", "60%", "--device", "cpu"), 25.0),
}
DEMO, DEMO_AT_MOST = ("segmentation optimize", "charlm optimize"), 120.0


class Goal(NamedTuple):
    """One command, and its goal: at most so many times the script's own time, and so many seconds more."""

    words: tuple[str, ...]
    times: float
    seconds: float


_FITS = ("optimize", "--memory", "70%")
_ROUNDS = (*_FITS, "--allow", "rounding")
GOALS = {
    "diagnose": Goal(("diagnose",), 1.5, 3.0),
    "diagnose, cpu": Goal(("diagnose", "--device", "cpu"), 1.5, 3.0),
    "optimize": Goal(_FITS, 3.0, 5.0),
    "optimize, cpu": Goal((*_FITS, "--device", "cpu"), 3.0, 5.0),
    "optimize, rounding": Goal(_ROUNDS, 5.0, 5.0),
    "optimize, rounding, cpu": Goal((*_ROUNDS, "--device", "cpu"), 5.0, 5.0),
}
RATIOS = {
    "six_seconds.py": (),
    **{path.name: () for path in sorted(OWN.glob("*.py"))},
    **dict.fromkeys(
        ("charlm.py", "gan.py", "resnet.py", "segmentation.py", "vit.py"), ("--steps", "8")
    ),
}
"""Twenty scripts of eight steps, each with its arguments; `six_seconds.py` has thirty."""


class Taken(NamedTuple):
    """Seconds of one run: on the clock, and of the processors in and outside the system."""

    wall: float
    user: float
    system: float


def command(verb: Verb, folder: Path) -> list[str]:
    """Its words, with a copy of its script in the folder."""
    shutil.copytree(EXAMPLES / "data", folder / "data")
    script = folder / verb.script
    sources = [one / verb.script for one in (EXAMPLES, OWN) if (one / verb.script).exists()]
    script.write_text(sources[0].read_text() if sources else SIX_SECONDS)
    if verb.words and not verb.words[0].startswith("-"):
        first, *rest = verb.words
        args = ["--", *verb.args] if verb.args else []
        return [sys.executable, "-m", "torchtrim", first, str(script), *rest, *args]
    return [sys.executable, str(script), *verb.words, *verb.args]


def run(verb: Verb) -> Taken:
    """Run it on a copy of its script. Raises where it fails; a budget that is missed is no failure."""
    with tempfile.TemporaryDirectory() as name:
        words = command(verb, Path(name))
        before, begin = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
        done = subprocess.run(words, cwd=name, capture_output=True, text=True, check=False)
        wall, after = time.perf_counter() - begin, resource.getrusage(resource.RUSAGE_CHILDREN)
    if done.returncode not in (0, 1):
        raise SystemExit(f"{' '.join(words)} ended with {done.returncode}:\n{done.stderr}")
    return Taken(wall, after.ru_utime - before.ru_utime, after.ru_stime - before.ru_stime)


def measure(names: list[str], rounds: int) -> dict[str, Any]:
    """The median and the range of each verb's seconds."""
    taken: dict[str, list[Taken]] = {name: [] for name in names}
    for _ in range(rounds):
        for name in random.sample(names, len(names)):
            taken[name].append(run(VERBS[name]))
            print(f"{name}: {taken[name][-1].wall:.1f} s", file=sys.stderr, flush=True)
    return {name: _summary(runs, VERBS[name].at_most) for name, runs in taken.items()}


def _summary(runs: list[Taken], at_most: float | None) -> dict[str, Any]:
    walls = [one.wall for one in runs]
    return {
        "seconds": round(statistics.median(walls), 1),
        "fastest": round(min(walls), 1),
        "slowest": round(max(walls), 1),
        "user_seconds": round(statistics.median(one.user for one in runs), 1),
        "system_seconds": round(statistics.median(one.system for one in runs), 1),
        "goal_seconds": at_most,
    }


def ratios(scripts: list[str], rounds: int, only: str = "") -> dict[str, Any]:
    """Each verb's seconds on each script, as the best of the rounds, and its ratio to the script's own.

    `only`: a word of the verbs that are run.
    """
    found = {}
    for script in scripts:
        args = RATIOS[script]
        verbs = {"alone": Verb(script, (), args=args)}
        goals = {name: goal for name, goal in GOALS.items() if only in name}
        verbs |= {name: Verb(script, goal.words, args=args) for name, goal in goals.items()}
        taken: dict[str, list[Taken]] = {name: [] for name in verbs}
        for _ in range(rounds):
            for name in random.sample(list(verbs), len(verbs)):
                taken[name].append(run(verbs[name]))
        best = {name: _best(runs) for name, runs in taken.items()}
        found[script] = {
            name: {**each, **(_ratios(each, best["alone"], GOALS[name]) if name in GOALS else {})}
            for name, each in best.items()
        }
        show_ratios(script, found[script])
    return found


def _best(runs: list[Taken]) -> dict[str, float]:
    wall, cpu = min(one.wall for one in runs), min(one.user + one.system for one in runs)
    return {"wall_seconds": round(wall, 2), "cpu_seconds": round(cpu, 2)}


def _ratios(found: dict[str, float], alone: dict[str, float], goal: Goal) -> dict[str, Any]:
    """The ratios, without the goal's constant too, and whether the goal is met on the clock."""
    wall, cpu = (found[key] / alone[key] for key in ("wall_seconds", "cpu_seconds"))
    beyond = (found["wall_seconds"] - goal.seconds) / alone["wall_seconds"]
    return {
        "wall_ratio": round(wall, 2),
        "cpu_ratio": round(cpu, 2),
        "wall_ratio_beyond_constant": round(max(beyond, 0.0), 2),
        "goal": f"{goal.times} x + {goal.seconds:.0f} s",
        "met": beyond <= goal.times,
    }


def show_ratios(script: str, found: dict[str, dict[str, Any]]) -> None:
    """One script's rows of the table."""
    for name, each in found.items():
        goal = ""
        if "goal" in each:
            goal = (
                f"  {each['cpu_ratio']:5.1f} x CPU {each['wall_ratio']:5.1f} x wall  goal {each['goal']}: "
                f"{'met' if each['met'] else 'MISSED'}"
            )
        print(
            f"{script:<15} {name:<24} CPU {each['cpu_seconds']:6.1f} s  "
            f"wall {each['wall_seconds']:6.1f} s{goal}",
            flush=True,
        )


def _together(found: list[dict[str, Any]]) -> dict[str, Any]:
    """Two runs in a row."""
    keys = [key for key in found[0] if key != "goal_seconds"]
    sums = {key: round(sum(one[key] for one in found), 1) for key in keys}
    return {**sums, "goal_seconds": DEMO_AT_MOST}


def show(verbs: dict[str, Any]) -> None:
    """A table."""
    for name, found in verbs.items():
        goal = f"goal {found['goal_seconds']:.0f} s" if found["goal_seconds"] else ""
        print(
            f"{name:<28} {found['seconds']:7.1f} s ({found['fastest']:.1f} to {found['slowest']:.1f}), "
            f"system {found['system_seconds']:.1f} s  {goal}"
        )


def main() -> None:
    """Measure, print, save."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help="all of them by default")
    parser.add_argument("--json", action="store_true", help="print the results as JSON")
    parser.add_argument("--ratios", action="store_true", help="compare with the script's own time")
    parser.add_argument("--only", default="", metavar="WORD", help="only verbs with this word")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    known = [*RATIOS] if options.ratios else [*VERBS]
    if unknown := set(options.names) - {*known}:
        parser.error(f"no {sorted(unknown)[0]!r} here; there are {', '.join(known)}")
    result: dict[str, Any] = {"rounds": options.rounds, "load_before": round(os.getloadavg()[0], 2)}
    if options.ratios:
        result["scripts"] = ratios(options.names or known, options.rounds, options.only)
    else:
        result["verbs"] = verbs = measure(options.names or known, options.rounds)
        if all(name in verbs for name in DEMO):
            verbs["make demo"] = _together([verbs[name] for name in DEMO])
        show(verbs)
    if not options.names:
        words = ["ratios" if options.ratios else "verbs", options.only]
        path = machine.save("-".join(word for word in words if word), result)
        print(path.read_text() if options.json else f"wrote {path}")


if __name__ == "__main__":
    main()
