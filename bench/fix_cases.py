"""Whether every fix holds on inputs other than those that it was written by: so many cases each, no clock.

python -m bench.fix_cases [FAMILY ...] [--cases 2000] [--seed 0] [--json]

The code and the draws are those of the tests of each file of fixes (`proving.prove`). Where the function as a
whole agrees on all kinds of input, cases have ranks 0 to 5 and all types. Elsewhere a fix is claimed, or
suggested, for the kinds of the run alone: where the function cannot run by itself, or differs for a kind
that the report names. There cases have the kinds of the evidence and other values. A case counts where the
original accepts it; it is unsound where the fix then gives something else, raises, or leaves other
gradients, inputs or random numbers. It does not count if the original only returns early: no values of its
kinds run every line that runs on those of the evidence. `--json` keeps the results of fixes that are not run.
"""

from __future__ import annotations

import argparse
import itertools
import random
import sys
import time
from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from bench.machine import save, saved
from torchtrim.source.facts import FixRefused

TESTS = Path(__file__).parent.parent / "tests"
sys.path.insert(0, str(TESTS))

from fixes import proving  # noqa: E402
from fixes.foreign import MANY_REDRAWN, lines_of  # noqa: E402

PATIENCE = 60
STRUCTURES = 40
TEXTS = 2
"""Texts that a code gets by different evidence. Arbitrary: to try one takes up to ten seconds."""
_SHOWN = 1500


class Case(NamedTuple):
    """A fix as it was written by evidence, and inputs to try it on."""

    rewrite: Any
    after: str
    evidence: proving.Inputs
    inputs: proving.Inputs


class Asked(NamedTuple):
    """What a test asked to have proved."""

    fix: Any
    code: str
    make: proving.Make
    structures: int
    suggested: bool

    def of_any_kind(self, rng: random.Random) -> Iterator[Case]:
        """Cases of every rank and type, where the whole function agrees on all kinds; none elsewhere."""
        every = proving.writings(
            self.fix,
            self.code,
            self.make,
            structures=min(self.structures, STRUCTURES),
            suggested=self.suggested,
            seed=str(rng.random()),
        )
        texts = {after: evidence for _, after, evidence in every}
        whole = (proving.whole(self.fix, self.code, one) for one in [*texts.values()][:TEXTS])
        written = [one for one in whole if one is not None]
        while written:
            rewrite, after, evidence = rng.choice(written)
            yield Case(rewrite, after, evidence, proving.foreign(rng, evidence))

    def of_the_run(self, rng: random.Random) -> Iterator[Case]:
        """Cases of the kinds of the evidence, which is the first draw of each structure."""
        refused = 0
        while refused < PATIENCE:
            draws = list(self.make(random.Random(rng.random())))
            try:
                rewrite = proving.fixed(self.fix, self.code, draws[0])
            except FixRefused:
                refused += 1
                continue
            if not rewrite.safe and not self.suggested:
                refused += 1
                continue
            refused = 0
            after = proving.text_of(rewrite)
            yield from (Case(rewrite, after, draws[0], one) for one in draws[1:] or draws)


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


def tried(asked: list[Asked], cases: int, seed: int) -> dict[str, Any]:
    """So many cases of one fix, spread over what its tests ask."""
    began, rng = time.process_time(), random.Random(f"{seed}/{asked[0].fix.name}")
    any_kind = [
        (one, itertools.chain([first], every))
        for one in asked
        if (first := next(every := one.of_any_kind(rng), None))
    ]
    sources = any_kind or [(one, one.of_the_run(rng)) for one in asked]
    found = _Found()
    while sources and found.cases < cases and found.tried < PATIENCE * cases:
        chosen = rng.randrange(len(sources))
        one, every = sources[chosen]
        if (case := next(every, None)) is None:
            del sources[chosen]
        else:
            found.take(one.code, case)
    return {
        "cases": found.cases,
        "kinds": "any" if any_kind else "the run's",
        "tried": found.tried,
        "codes": len(any_kind or asked),
        "unsound": found.unsound,
        "ranks": dict(sorted(found.ranks.items())),
        "types": dict(sorted(found.types.items())),
        "cpu_seconds": round(time.process_time() - began, 1),
    }


class _Found:
    """What came of the cases of one fix."""

    def __init__(self) -> None:
        self.cases = self.tried = 0
        self.ranks: Counter[int] = Counter()
        self.types: Counter[str] = Counter()
        self.unsound: list[str] = []

    def take(self, code: str, case: Case) -> None:
        """Run the code before and after the fix."""
        self.tried += 1
        try:
            if not proving.agree_if_accepted(
                case.rewrite, code, case.after, case.evidence, case.inputs
            ):
                return
        except AssertionError as error:
            if not _as_a_whole(code, case):
                return
            self.unsound.append(str(error)[:_SHOWN])
        self.cases += 1
        for tensor in _tensors(case.inputs):
            self.ranks[tensor.dim()] += 1
            self.types[str(tensor.dtype).removeprefix("torch.")] += 1


def _as_a_whole(code: str, case: Case) -> bool:
    """Whether values of the kinds of a case run every line that runs on those of its evidence."""
    rng, raises = random.Random(code), partial(proving.raises, code)
    seen = lines_of(raises, rng, case.evidence, MANY_REDRAWN)
    return seen <= lines_of(raises, rng, case.inputs, MANY_REDRAWN)


def _tensors(case: dict[str, Any]) -> Iterator[torch.Tensor]:
    for value in case.values():
        yield from proving.leaves(value)


def named() -> list[str]:
    """The families whose tests prove something."""
    files = sorted((TESTS / "fixes").glob("test_*.py"))
    texts = {one.stem.removeprefix("test_"): one.read_text() for one in files}
    return [name for name, text in texts.items() if "proving.prove(" in text]


def main() -> None:
    """Try those that are named, or all."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("families", nargs="*", help="files of fixes; all where none is given")
    parser.add_argument("--cases", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true", help="write the result")
    options = parser.parse_args()
    for family in options.families or named():
        for name, asked in _by_fix(asked_of(family)).items():
            one = {"seed": options.seed, **tried(asked, options.cases, options.seed)}
            print(
                f"{name:26} {one['cases']:5} of {one['tried']:6} of kinds: {one['kinds']}, "
                f"{len(one['unsound'])} unsound, ranks {one['ranks']}, {one['cpu_seconds']} s",
                flush=True,
            )
            for text in one["unsound"][:3]:
                print(text)
            if options.json:
                _keep(name, one)


def _by_fix(asked: list[Asked]) -> dict[str, list[Asked]]:
    found: dict[str, list[Asked]] = {}
    for one in asked:
        found.setdefault(one.fix.name, []).append(one)
    return found


def _keep(name: str, one: dict[str, Any]) -> None:
    found = {**saved("fix_cases").get("fixes", {}), name: one}
    figures = {
        "fixes_tried": len(found),
        "of_any_kind": sum(one["kinds"] == "any" for one in found.values()),
        "fewest_cases": min(one["cases"] for one in found.values()),
        "cases": sum(one["cases"] for one in found.values()),
        "unsound": sum(len(one["unsound"]) for one in found.values()),
    }
    save("fix_cases", {"figures": figures, "fixes": dict(sorted(found.items()))})


if __name__ == "__main__":
    main()
