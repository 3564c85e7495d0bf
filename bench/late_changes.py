"""What becomes of a planned run when the script does something new after the steps that were certified.

python -m bench.late_changes [--only PATTERN] [--technique NAME] [--shape NAME]
    [--optimizer NAME] [--drawn COUNT] [--few COUNT] [--seed N] [--hooks] [--skip COUNT] [--seconds N]
    [--json]

Each entry of `bench/late/attacks.toml` changes `bench/late/loop.py` from its fifth step on: a buffer that a
block begins to write, a hook, another batch size, a skipped step. `--drawn` draws changes, hooks of all kinds
among them, and makes them to one of six models with one of three optimizers, from step 8, 20 or 50 on. Plans
of each technique that has a place there are made of the loop as it is, and the changed loop runs with them
and without. What it prints (losses, digests of weights, buffers and optimizer states, counters, random
numbers drawn last) must be the same, to the bit where the technique says so and else by the rule of the
certificate, or the run must stop before a number differs, and name the cause. SEMANTIC techniques are
compared with the change made by hand. Anything else is a fault. A run that `--seconds` ends says where
`--skip` goes on, and its figures join those in the file.
"""

from __future__ import annotations

import argparse
import collections
import fnmatch
import functools
import itertools
import random
import sys
import time
from collections.abc import Iterator

import torch

from bench.late.changes import OPTIMIZERS, SHAPES, Case, drawn, hooked, written
from bench.late.running import Planner, judged
from bench.machine import save, saved
from torchtrim.executor.registry import names
from torchtrim.records.plan import Plan

FAULTS = ("SILENT", "WRONG CAUSE", "LATE STOP")


@functools.cache
def plans_for(shape: str, optimizer: str, seed: int) -> dict[str, Plan]:
    """The plans for a model, as another seed chooses their places."""
    return Planner(shape, optimizer, seed).plans()


def cases(options: argparse.Namespace) -> Iterator[Case]:
    """The cases that were asked for."""
    if options.drawn:
        yield from itertools.islice(drawn(options.seed), options.drawn)
        return
    for change in (*written(), *(hooked() if options.hooks else ())):
        if fnmatch.fnmatch(change.name, options.only):
            yield Case((change,), options.shape, options.optimizer)


def main() -> None:
    """Run the changes and print what becomes of each."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", default="*")
    parser.add_argument("--technique", choices=names())
    parser.add_argument(
        "--shape", choices=SHAPES, default="mlp", help="the model of changes that are not drawn"
    )
    parser.add_argument("--optimizer", choices=OPTIMIZERS, default="SGD", help="that of those")
    parser.add_argument("--drawn", type=int, default=0)
    parser.add_argument("--hooks", action="store_true", help="hooks of all kinds beside the file's")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--few", type=int, default=0, help="so many techniques for each change, drawn"
    )
    parser.add_argument("--skip", type=int, default=0, help="so many of the cases")
    parser.add_argument("--seconds", type=float, default=1e9, help="end before a case after these")
    parser.add_argument("--json", action="store_true", help="keep the figures under bench/results")
    options = parser.parse_args()
    torch.set_num_threads(1)
    found: dict[str, dict[str, str]] = collections.defaultdict(dict)
    ends = time.monotonic() + options.seconds
    for number, case in enumerate(cases(options)):
        if number < options.skip:
            continue
        if time.monotonic() > ends:
            print(f"go on with --skip {number}", flush=True)
            break
        if number % 10 == 0:
            print(f"{number} cases", file=sys.stderr, flush=True)
        plans = plans_for(case.shape, case.optimizer, options.seed)
        if options.technique:
            plans = {name: one for name, one in plans.items() if name == options.technique}
        if options.few:
            rng = random.Random(options.seed + number)
            plans = {name: plans[name] for name in rng.sample(sorted(plans), options.few)}
        for name, verdict in judged(case, plans).items():
            found[name][case.name] = verdict
            if verdict.startswith(FAULTS) or options.only != "*":
                print(f"{name:22} {case.name}: {verdict}", flush=True)
    for name, verdicts in found.items():
        counts = collections.Counter(verdict.partition(":")[0] for verdict in verdicts.values())
        print(f"{name:22} {len(verdicts)} cases: {dict(counts)}")
    if options.json:
        which = "late_changes_drawn" if options.drawn else "late_changes"
        everything = not options.skip and options.only == "*" and options.technique is None
        _join(which, found, anew=everything)
    if any(one.startswith(FAULTS) for verdicts in found.values() for one in verdicts.values()):
        sys.exit(1)


def _join(which: str, found: dict[str, dict[str, str]], *, anew: bool) -> None:
    whole = {} if anew else saved(which)
    for name, verdicts in found.items():
        whole[name] = dict(sorted({**whole.get(name, {}), **verdicts}.items()))
    save(which, {name: verdicts for name, verdicts in whole.items() if name != "machine"})


if __name__ == "__main__":
    main()
