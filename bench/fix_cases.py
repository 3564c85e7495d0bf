"""Whether every fix holds for inputs of ranks 0 to 5 and of all types: so many cases each, without a clock.

python -m bench.fix_cases [FIX ...] [--cases 2000] [--seed 0] [--json]

The code and the draws are those of the fixes' own tests (`proving.prove`), as far as the function agrees on
all kinds of input, since others are not applied. A case counts where the original accepts it; it is unsound
where the fix then gives something else, raises, or leaves other gradients, inputs or random numbers. `--json`
keeps the results of fixes that are not named.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from bench.machine import RESULTS, save, slug

TESTS = Path(__file__).parent.parent / "tests"
sys.path.insert(0, str(TESTS))

from fixes import proving  # noqa: E402

PATIENCE = 60
STRUCTURES = 40
TEXTS = 2
"""Texts that a code gets by different evidence. Arbitrary: to try one takes up to ten seconds."""
_SHOWN = 1500


class Asked(NamedTuple):
    """What a test asked to have proved."""

    fix: Any
    code: str
    make: proving.Make
    structures: int
    suggested: bool

    def written(self, seed: int) -> list[tuple[Any, str, proving.Inputs]]:
        """What the fix writes by the evidence of some structures, where the whole function agrees."""
        every = proving.writings(
            self.fix,
            self.code,
            self.make,
            structures=min(self.structures, STRUCTURES),
            suggested=self.suggested,
            seed=str(seed),
        )
        texts = {after: evidence for _, after, evidence in every}
        tried = (proving.whole(self.fix, self.code, one) for one in [*texts.values()][:TEXTS])
        return [one for one in tried if one is not None]


class Asking:
    """A plugin of pytest that notes what tests ask, and proves nothing."""

    def __init__(self) -> None:
        self.asked: list[Asked] = []

    def prove(
        self,
        fix: Any,
        code: str,
        make: proving.Make,
        *,
        structures: int = 250,
        suggested: bool = False,
        **_: Any,
    ) -> proving.Proof:
        """Stand in for `proving.prove`."""
        self.asked.append(Asked(fix, code, make, structures, suggested))
        return proving.Proof(agreed=10**9)


def asked_of(name: str) -> list[Asked]:
    """What the tests of a fix ask."""
    plugin = Asking()
    real, proving.prove = proving.prove, plugin.prove  # type: ignore[assignment]
    try:
        pytest.main(
            [
                "-q",
                "--tb=no",
                "--no-summary",
                "--assert=plain",
                "-p",
                "no:cacheprovider",
                _file(name),
            ]
        )
    finally:
        proving.prove = real
    return plugin.asked


def _file(name: str) -> str:
    return str(TESTS / "fixes" / f"test_{name}.py")


def tried(name: str, cases: int, seed: int) -> dict[str, Any]:
    """So many cases of one fix, spread over what its tests ask."""
    began, asked = time.process_time(), asked_of(name)
    writings = [(one, found) for one in asked if (found := one.written(seed))]
    rng = random.Random(f"{seed}/{name}")
    ranks: Counter[int] = Counter()
    types: Counter[str] = Counter()
    unsound: list[str] = []
    count = tries = 0
    while writings and count < cases and tries < PATIENCE * cases:
        tries += 1
        one, written = rng.choice(writings)
        rewrite, after, evidence = rng.choice(written)
        case = proving.foreign(rng, evidence)
        try:
            if not proving.agree_if_accepted(rewrite, one.code, after, evidence, case):
                continue
        except AssertionError as error:
            unsound.append(str(error)[:_SHOWN])
        count += 1
        for tensor in _tensors(case):
            ranks[tensor.dim()] += 1
            types[str(tensor.dtype).removeprefix("torch.")] += 1
    return {
        "cases": count,
        "tried": tries,
        "codes": len(writings),
        "unsound": unsound,
        "ranks": dict(sorted(ranks.items())),
        "types": dict(sorted(types.items())),
        "cpu_seconds": round(time.process_time() - began, 1),
    }


def _tensors(case: dict[str, Any]) -> Iterator[torch.Tensor]:
    for value in case.values():
        yield from proving.leaves(value)


def named() -> list[str]:
    """The fixes whose tests prove something."""
    files = sorted((TESTS / "fixes").glob("test_*.py"))
    texts = {one.stem.removeprefix("test_"): one.read_text() for one in files}
    return [name for name, text in texts.items() if "proving.prove(" in text]


def main() -> None:
    """Try those that are named, or all."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("fixes", nargs="*", help="names; all where none is given")
    parser.add_argument("--cases", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true", help="write the result")
    options = parser.parse_args()
    path = RESULTS / slug() / "fix_cases.json"
    for name in options.fixes or named():
        one = {"seed": options.seed, **tried(name, options.cases, options.seed)}
        print(
            f"{name:26} {one['cases']:5} of {one['tried']:6}, {len(one['unsound'])} unsound, "
            f"ranks {one['ranks']}, {one['cpu_seconds']} s",
            flush=True,
        )
        for text in one["unsound"][:3]:
            print(text)
        if options.json:
            found = json.loads(path.read_text())["fixes"] if path.exists() else {}
            found[name] = one
            figures = {
                "fixes_tried": len(found),
                "fewest_cases": min(one["cases"] for one in found.values()),
                "cases": sum(one["cases"] for one in found.values()),
                "unsound": sum(len(one["unsound"]) for one in found.values()),
            }
            save("fix_cases", {"figures": figures, "fixes": dict(sorted(found.items()))})


if __name__ == "__main__":
    main()
