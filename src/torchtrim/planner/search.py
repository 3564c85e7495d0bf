"""Chooses options: the least added time under a peak, and the smallest peak that can be had.

The choice is a local search over sets of options whose spans do not overlap: options are added while
they bring the peak down most for their time, then taken away or exchanged while the peak allows it.
Every set is judged by simulating the whole step, so a set that moves the peak elsewhere is seen.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from torchtrim.planner.simulate import Outcome, Simulator
from torchtrim.techniques.base import Option

_MOST_ROUNDS = 200
Chosen = tuple[int, ...]


class Choice(NamedTuple):
    """Options and what the step is with them."""

    options: tuple[Option, ...]
    outcome: Outcome


class Search:
    """All choices among the options of one profile."""

    def __init__(self, simulator: Simulator, options: Sequence[Option]) -> None:
        self._simulator = simulator
        self._known: dict[Chosen, Outcome] = {}
        self._options = [
            option
            for number, option in enumerate(options)
            if simulator.run([option]).added_seconds > 0
        ]
        self._clashes = [
            {j for j, other in enumerate(self._options) if j != i and _overlap(option, other)}
            for i, option in enumerate(self._options)
        ]

    def cheapest(self, budget: int) -> Choice | None:
        """The choice with the least added time whose peak is within the budget; None if none is found."""
        best: Chosen | None = None
        for start in self._starts():
            found = self._descend(start, lambda outcome: outcome.peak_bytes <= budget)
            if self._run(found).peak_bytes <= budget:
                found = self._save_time(found, budget)
                if best is None or self._seconds(found) < self._seconds(best):
                    best = found
        return None if best is None else self._choice(best)

    def smallest(self) -> Choice:
        """The choice with the smallest peak found."""
        found = [self._descend(start, lambda _: False) for start in self._starts()]
        best = min(found, key=lambda chosen: (self._run(chosen).peak_bytes, self._seconds(chosen)))
        return self._choice(self._save_time(best, self._run(best).peak_bytes))

    def _starts(self) -> list[Chosen]:
        """Nothing, and the options of each size that fit beside each other, the largest spans first."""
        sizes = [sum(span.last - span.first for span in o.spans) for o in self._options]
        order = sorted(range(len(sizes)), key=lambda i: -sizes[i])
        starts: list[Chosen] = [()]
        for limit in dict.fromkeys((1.0, 0.5, 0.25, 0.125)):
            most = max(sizes, default=0) * limit
            chosen: list[int] = []
            for i in order:
                if sizes[i] <= most and not self._clashes[i].intersection(chosen):
                    chosen.append(i)
            starts.append(tuple(sorted(chosen)))
        return list(dict.fromkeys(starts))

    def _descend(self, start: Chosen, done: Callable[[Outcome], bool]) -> Chosen:
        """Change one option at a time, each time the one that lowers the peak most for its time."""
        chosen = start
        for _ in range(_MOST_ROUNDS):
            now = self._run(chosen)
            if done(now):
                break
            lower = [
                (self._gain(now, self._run(other)), other)
                for other in self._neighbours(chosen)
                if self._run(other).peak_bytes < now.peak_bytes
            ]
            if not lower:
                break
            chosen = max(lower)[1]
        return chosen

    def _save_time(self, chosen: Chosen, budget: int) -> Chosen:
        """Take options away or exchange them, each time the most time saved, while the peak allows it."""
        for _ in range(_MOST_ROUNDS):
            now = self._seconds(chosen)
            quicker = [
                (self._seconds(other), other)
                for other in self._neighbours(chosen)
                if self._seconds(other) < now and self._run(other).peak_bytes <= budget
            ]
            if not quicker:
                break
            chosen = min(quicker)[1]
        return chosen

    def _neighbours(self, chosen: Chosen) -> Iterable[Chosen]:
        have = set(chosen)
        for i in range(len(self._options)):
            if i in have:
                yield tuple(sorted(have - {i}))
            else:
                yield tuple(sorted((have - self._clashes[i]) | {i}))

    def _gain(self, now: Outcome, then: Outcome) -> float:
        saved = now.peak_bytes - then.peak_bytes
        return saved / max(then.added_seconds - now.added_seconds, 1e-6)

    def _run(self, chosen: Chosen) -> Outcome:
        known = self._known.get(chosen)
        if known is None:
            options = [self._options[i] for i in chosen]
            known = self._known[chosen] = self._simulator.run(options)
        return known

    def _seconds(self, chosen: Chosen) -> float:
        return self._run(chosen).added_seconds

    def _choice(self, chosen: Chosen) -> Choice:
        return Choice(tuple(self._options[i] for i in chosen), self._run(chosen))


def _overlap(one: Option, other: Option) -> bool:
    return any(a.first < b.last and b.first < a.last for a in one.spans for b in other.spans)
