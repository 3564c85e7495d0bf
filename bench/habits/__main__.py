"""Scripts drawn from what people do to their training loops, plain and under torchtrim.

    python -m bench.habits [SCRIPTS [SEED]] [--verbs] [--seconds N] [--again SEED] [--smaller SEED]

Each script has one habit of each kind of `bench/habits/`: its block, what its modules take and return,
where batches come from, the loop, what stands around it, the optimizer, the step, its end and its start; and
some of the settings and additions of `customs.py`. It runs plain and under a verb that plans, each in a fork
of one process that has imported torch, and then under `run` with the plan. One script in four goes through
`diagnose` and `optimize` too, whose peaks are compared with those of torch's allocator, and whose floors with
the peaks of checkpointed blocks. With `--verbs`: every verb, at one of four budgets. `--seconds` begins no
script after these; runs from other seeds join those in the file. Faults are other output, another
exit code, a script that fails only under torchtrim, a traceback, a wrong peak, a certificate that does not
hold, and a refusal above what a person reaches. `--again` prints the script and the faults of one seed,
`--smaller` the fewest habits that still have a fault of that kind.
"""

from __future__ import annotations

import argparse
import itertools
import random
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from bench.habits.judging import Fault, faults, faults_of_verbs
from bench.habits.running import prepare
from bench.habits.script import Habits, drawn, simpler, text_of
from bench.machine import save, saved

Judge = Callable[[Habits, Path, int], list[Fault]]


def _cheap(habits: Habits, folder: Path, seed: int) -> list[Fault]:
    return list(faults(habits, folder, random.Random(seed)))


def _whole(habits: Habits, folder: Path, seed: int) -> list[Fault]:
    return list(faults_of_verbs(habits, folder, random.Random(seed)))


def judged(
    seeds: Iterable[int], judge: Judge, root: Path, seconds: float
) -> Iterator[tuple[int, list[Fault]]]:
    """Yield each seed with the faults of its script."""
    ends = time.monotonic() + seconds
    for seed in itertools.takewhile(lambda _: time.monotonic() < ends, seeds):
        folder = root / str(seed)
        yield seed, judge(drawn(seed), folder, seed)
        shutil.rmtree(folder, ignore_errors=True)


def smaller(seed: int, judge: Judge, root: Path) -> tuple[Habits, list[Fault]]:
    """Return the fewest habits that still have a fault of the same kind as the seed's first."""
    habits = drawn(seed)
    found = judge(habits, root / "0", seed)
    tries = 0
    while found:
        for fewer in simpler(habits):
            tries += 1
            same = [
                one for one in judge(fewer, root / str(tries), seed) if one.kind == found[0].kind
            ]
            if same:
                habits, found = fewer, same
                break
        else:
            break
    return habits, found


def main() -> None:
    """The scripts, or one of them."""
    parser = argparse.ArgumentParser(prog="python -m bench.habits")
    parser.add_argument("scripts", type=int, nargs="?", default=3_000)
    parser.add_argument("seed", type=int, nargs="?", default=random.SystemRandom().randrange(2**31))
    parser.add_argument("--verbs", action="store_true")
    parser.add_argument("--seconds", type=float, default=1e9)
    parser.add_argument("--again", type=int)
    parser.add_argument("--smaller", type=int)
    parser.add_argument("--no-save", action="store_true")
    chosen = parser.parse_args()
    judge = _whole if chosen.verbs else _cheap
    root = Path(
        tempfile.mkdtemp()
    )  # not one that cleans itself up, which each fork would do as it ends
    try:
        prepare(root)
        _chosen(chosen, judge, root)
    finally:
        shutil.rmtree(root, ignore_errors=True)


def _chosen(chosen: argparse.Namespace, judge: Judge, root: Path) -> None:
    if chosen.again is not None:
        habits = drawn(chosen.again)
        found = judge(habits, root / "again", chosen.again)
    elif chosen.smaller is not None:
        habits, found = smaller(chosen.smaller, judge, root)
    else:
        _all(chosen, judge, root)
        return
    print(text_of(habits), *(f"{each.kind}: {each.shown}" for each in found), sep="\n")


def _all(chosen: argparse.Namespace, judge: Judge, root: Path) -> None:
    found: dict[str, dict[str, Any]] = {}
    unsound = 0  # scripts that torch itself does not run
    seeds = range(chosen.seed, chosen.seed + chosen.scripts)
    name = "habits_verbs" if chosen.verbs else "habits"
    try:
        for seed, faults in judged(seeds, judge, root, chosen.seconds):
            if any(one.kind == "plain" for one in faults):
                unsound += 1
                if not chosen.no_save:
                    _join(name, {str(seed): None})
                continue
            for one in faults:
                print(f"seed {seed} ({drawn(seed)})\n  {one.kind}: {one.shown}", flush=True)
            kinds = [one.kind for one in faults]
            found[str(seed)] = {"habits": str(drawn(seed)), "faults": kinds}
            if not chosen.no_save:  # each as it ends, since a batch may be ended at any moment
                _join(name, {str(seed): found[str(seed)]})
    except KeyboardInterrupt:
        pass
    faulty = {seed: one for seed, one in found.items() if one["faults"]}
    counts = Counter(kind for one in faulty.values() for kind in one["faults"])
    print(
        f"{len(found)} scripts from seed {chosen.seed}, {len(faulty)} with faults: {dict(counts)}"
    )
    print(f"go on with seed {chosen.seed + len(found) + unsound}")


def _join(name: str, found: Mapping[str, dict[str, Any] | None]) -> None:
    """Put the scripts in the place of those with the same seeds in the file. None: torch does not run it."""
    before = saved(name)
    clean = {*map(str, before.get("clean", ()))} - found.keys()
    faults = {seed: one for seed, one in before.get("faults", {}).items() if seed not in found}
    for seed, one in found.items():
        if one is not None and one["faults"]:
            faults[seed] = one
        elif one is not None:
            clean.add(seed)
    counts = Counter(kind for one in faults.values() for kind in one["faults"])
    summary = {
        "scripts": len(clean) + len(faults),
        "faulty": len(faults),
        "kinds": dict(counts),
    }
    save(name, {"summary": summary, "clean": sorted(map(int, clean)), "faults": faults})


if __name__ == "__main__":
    main()
