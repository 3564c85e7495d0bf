"""Chooses options: the least added time under a peak, and the smallest peak that can be had.

The choice is a local search over sets of options whose spans do not overlap, begun from rankings of the
options (the most bytes for their time, the largest spans first) cut where the budget is met. A set is
then bettered by adding, removing and exchanging options: all of them where there are few, else those
that bear on the operator at which memory is highest. Every set is judged by simulating the whole step,
so a set that moves the peak elsewhere is seen. How many sets are tried is bounded by the step's size.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from torchtrim.planner.simulate import Outcome, Simulator
from torchtrim.techniques.base import Option

_WORK = 6_000_000
_FEW = 120
_NEAR = 12
_KEPT = 4
_LEAST_SECONDS = 1e-7
Chosen = tuple[int, ...]


class Choice(NamedTuple):
    """Options and what the step is with them."""

    options: tuple[Option, ...]
    outcome: Outcome


class Search:
    """All choices among the options of one profile. `size`: operators of the step."""

    def __init__(self, simulator: Simulator, options: Sequence[Option], size: int = 1000) -> None:
        self._simulator = simulator
        self._known: dict[Chosen, Outcome] = {}
        self._options = [option for option in options if simulator.seconds(option) > 0]
        self._clashes = _clashes(self._options)
        self._ranges = {o.cut: i for i, o in enumerate(self._options) if o.cut is not None}
        self._tries = max(_WORK // (size + 10 * len(self._options) + 1), 60)
        self._left = 0

    def cheapest(self, budget: int) -> Choice | None:
        """The choice with the least added time whose peak is within the budget; None if none is found."""
        self._left = self._tries
        found = [self._cut(ranking, budget) for ranking in self._rankings()]
        if all(self._run(chosen).peak_bytes > budget for chosen in found):
            found += self._partitions()
            found.append(self._lower(found, lambda outcome: outcome.peak_bytes <= budget))
        fitting = [chosen for chosen in found if self._run(chosen).peak_bytes <= budget]
        if not fitting:
            return None
        self._left = self._tries
        best = self._save_time(min(fitting, key=self._seconds), budget)
        return self._choice(best)

    def smallest(self) -> Choice:
        """The choice with the smallest peak found."""
        self._left = self._tries
        starts = [start for ranking in self._rankings() for start in self._prefixes(ranking)]
        starts += self._partitions()
        best = self._lower(starts, lambda _: False)
        self._left = self._tries // 2
        return self._choice(self._save_time(best, self._run(best).peak_bytes))

    def _rankings(self) -> list[Chosen]:
        """Orders in which options that fit beside each other may be taken."""
        peak = self._run(()).peak_operator
        sizes = [sum(span.last - span.first for span in o.spans) for o in self._options]
        freed = [self._simulator.freed(o, peak) for o in self._options]
        seconds = [self._simulator.seconds(o) for o in self._options]
        numbers = range(len(sizes))
        orders = [
            sorted(numbers, key=lambda i: -freed[i] / seconds[i]),
            sorted(numbers, key=lambda i: -freed[i]),
        ]
        for limit in (1.0, 0.5, 0.25, 0.125, 0.0625):
            most = max(sizes, default=0) * limit
            orders.append(sorted((i for i in numbers if sizes[i] <= most), key=lambda i: -sizes[i]))
        return list(dict.fromkeys(tuple(self._apart(order)) for order in orders))

    def _apart(self, order: Iterable[int]) -> list[int]:
        """The options of an order that do not overlap an earlier one."""
        taken: list[int] = []
        barred: set[int] = set()
        for i in order:
            if i not in barred:
                taken.append(i)
                barred |= self._clashes[i]
        return taken

    def _prefixes(self, ranking: Chosen) -> Iterable[Chosen]:
        """Beginnings of a ranking of several lengths, the whole one included."""
        lengths = {len(ranking) * k // 6 for k in range(7)}
        return (tuple(sorted(ranking[:length])) for length in lengths)

    def _partitions(self) -> list[Chosen]:
        """Ways to cut each chain, found from its beginning to its end.

        Backward comes to the beginning last, so how a beginning is cut settles the peak from there on,
        whatever follows. Of each beginning the few with the lowest peak, or the least held, are kept.
        """
        found: list[Chosen] = []
        for chain in dict.fromkeys(name for name, _, _ in self._ranges):
            ranges = {(a, b): i for (name, a, b), i in self._ranges.items() if name == chain}
            cuts = sorted({cut for ends in ranges for cut in ends})
            kept: dict[int, list[Chosen]] = {cuts[0]: [()]}
            for position, end in enumerate(cuts[1:], 1):
                paths = list(kept[cuts[position - 1]])
                for begin in cuts[:position]:
                    if (begin, end) in ranges:
                        paths += [(*path, ranges[begin, end]) for path in kept[begin]]
                kept[end] = self._best_paths(paths, [i for (_, e), i in ranges.items() if e == end])
            found += [tuple(sorted(path)) for path in kept[cuts[-1]]]
        return list(dict.fromkeys(found))

    def _best_paths(self, paths: list[Chosen], last: list[int]) -> list[Chosen]:
        """The paths to keep; `last`: options that end where the paths do."""
        if not last:
            return paths[:_KEPT]
        since = self._simulator.begins(self._options[last[0]])
        tails = {
            path: self._simulator.tail((self._options[i] for i in path), since)
            for path in dict.fromkeys(paths)
        }
        self._left -= len(tails)
        lowest = sorted(tails, key=tails.__getitem__)[:_KEPT]
        least = sorted(tails, key=lambda path: tails[path][::-1])[:_KEPT]
        return list(dict.fromkeys((*lowest, *least)))

    def _recut(self, have: set[int]) -> Iterable[set[int]]:
        """A range split in two, merged with the next, or with the cut between them moved."""
        ranges = {cut: i for cut, i in self._ranges.items() if i in have}
        for (chain, first, last), i in ranges.items():
            following = [(cut, j) for cut, j in ranges.items() if cut[:2] == (chain, last)]
            end, out = (following[0][0][2], {i, following[0][1]}) if following else (last, {i})
            if (chain, first, end) in self._ranges:
                yield (have - out) | {self._ranges[chain, first, end]}
            for cut, j in self._ranges.items():
                if cut[:2] == (chain, first) and (chain, cut[2], end) in self._ranges:
                    yield (have - out) | {j, self._ranges[chain, cut[2], end]}

    def _cut(self, ranking: Chosen, budget: int) -> Chosen:
        """The shortest beginning of a ranking that meets the budget, found by halving."""
        lengths = range(len(ranking) + 1)
        enough = bisect_left(
            lengths, True, key=lambda n: self._run(tuple(sorted(ranking[:n]))).peak_bytes <= budget
        )
        return tuple(sorted(ranking[:enough]))

    def _lower(self, starts: Iterable[Chosen], done: Callable[[Outcome], bool]) -> Chosen:
        """The lowest peak that is reached from the best starts, one change at a time."""
        order = sorted(set(starts), key=lambda chosen: self._run(chosen).peak_bytes)
        return min(
            (self._descend(start, done) for start in order[:4]),
            key=lambda chosen: (self._run(chosen).peak_bytes, self._seconds(chosen)),
        )

    def _descend(self, chosen: Chosen, done: Callable[[Outcome], bool]) -> Chosen:
        """Change one option at a time, each time the one that lowers the peak most for its time."""
        while not done(self._run(chosen)) and self._left > 0:
            now = self._run(chosen)
            lower = [
                (self._gain(now, self._run(other)), other)
                for other in self._neighbours(chosen, now.peak_operator)
                if self._run(other).peak_bytes < now.peak_bytes
            ]
            if not lower:
                break
            chosen = max(lower)[1]
        return chosen

    def _save_time(self, chosen: Chosen, budget: int) -> Chosen:
        """Take options away or exchange them, the dearest first, while the peak allows it."""
        bettered = True
        while bettered and self._left > 0:
            bettered = False
            for other in self._cheaper(chosen):
                if self._left <= 0:
                    break
                quicker = self._seconds(other) < self._seconds(chosen) - _LEAST_SECONDS
                if quicker and self._run(other).peak_bytes <= budget:
                    chosen, bettered = other, True
                    break
        return chosen

    def _cheaper(self, chosen: Chosen) -> list[Chosen]:
        """The choice less one option, or with others in its place, that take less time: quickest first."""
        have = set(chosen)
        now = self._seconds(chosen)
        found = []
        for i in chosen:
            found.append((self._simulator.seconds(self._options[i]), have - {i}))
        for i in range(len(self._options)):
            if i not in have and (out := have & self._clashes[i]):
                saved = self._sum(out) - self._simulator.seconds(self._options[i])
                if saved > 0:
                    found.append((saved, (have - out) | {i}))
        for other in self._recut(have):
            found.append((now - self._sum(other), other))
        found += self._swaps(have) if len(self._options) <= _FEW else []
        found.sort(key=lambda pair: -pair[0])
        return [tuple(sorted(other)) for saved, other in found if 0 < saved <= now]

    def _swaps(self, have: set[int]) -> list[tuple[float, set[int]]]:
        """One option for a quicker one elsewhere."""
        return [
            (self._sum({i}) - self._sum({j}), (have - {i}) | {j})
            for i in have
            for j in range(len(self._options))
            if j not in have and not self._clashes[j] & have and self._sum({j}) < self._sum({i})
        ]

    def _sum(self, options: Iterable[int]) -> float:
        return sum(self._simulator.seconds(self._options[i]) for i in options)

    def _neighbours(self, chosen: Chosen, peak: int) -> Iterable[Chosen]:
        have = set(chosen)
        for i in self._near(have, peak):
            if i in have:
                yield tuple(sorted(have - {i}))
            else:
                yield tuple(sorted((have - self._clashes[i]) | {i}))
        for other in self._recut(have):
            yield tuple(sorted(other))

    def _near(self, have: set[int], peak: int) -> Iterable[int]:
        """Options to change: all if they are few, else those that bear on the peak."""
        numbers = range(len(self._options))
        if len(self._options) <= _FEW:
            return numbers
        free = [i for i in numbers if i not in have]
        freed = {i: self._simulator.freed(self._options[i], peak) for i in free}
        best = sorted(free, key=lambda i: -freed[i])[:_NEAR]
        dense = sorted(free, key=lambda i: -freed[i] / self._sum({i}))[:_NEAR]
        running = [i for i in have if self._simulator.reruns_at(self._options[i], peak)]
        inner = [j for i in running for j in sorted(self._clashes[i])][: 2 * _NEAR]
        return dict.fromkeys((*best, *dense, *running, *inner))

    def _gain(self, now: Outcome, then: Outcome) -> float:
        saved = now.peak_bytes - then.peak_bytes
        return saved / max(then.added_seconds - now.added_seconds, 1e-6)

    def _run(self, chosen: Chosen) -> Outcome:
        known = self._known.get(chosen)
        if known is None:
            self._left -= 1
            options = [self._options[i] for i in chosen]
            known = self._known[chosen] = self._simulator.run(options)
        return known

    def _seconds(self, chosen: Chosen) -> float:
        return self._run(chosen).added_seconds

    def _choice(self, chosen: Chosen) -> Choice:
        return Choice(tuple(self._options[i] for i in chosen), self._run(chosen))


def _clashes(options: Sequence[Option]) -> list[set[int]]:
    """For each option those that overlap it."""
    clashes: list[set[int]] = [set() for _ in options]
    spans = sorted(
        (span.first, span.last, i) for i, option in enumerate(options) for span in option.spans
    )
    running: list[tuple[int, int]] = []
    for first, last, i in spans:
        running = [(end, j) for end, j in running if end > first]
        for _, j in running:
            if i != j:
                clashes[i].add(j)
                clashes[j].add(i)
        running.append((last, i))
    return clashes
