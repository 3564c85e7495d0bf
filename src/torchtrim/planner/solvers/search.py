"""Solvers on the simulator: exhaustive for a few options, and a local search for many.

The local search starts from rankings of the options, from partitions of chains, from manual plans, and from
prices per byte. It simulates every set of options as a whole, so it sees sets that move the peak elsewhere,
and offers each to the front. First it lowers the peak as far as possible, one change at a time, from the best
of several starts, with all options and with those of each technique alone. Then, for each of a fixed series
of budgets, it makes the quickest known choice quicker. The sets to try depend on the problem alone, never on
the requested budget, so a looser budget gets a plan that is at least as quick as a tighter one's.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice

from torchtrim.planner.by_hand import checkpointed
from torchtrim.planner.problem import Chosen, Front, Point, Problem, Solution
from torchtrim.step.simulate import Outcome

_KEPT = 4  # Arbitrary; prefixes of a partition to keep in addition to the quickest.


class Chains:
    """The chain ranges among the options of a problem."""

    def __init__(self, problem: Problem) -> None:
        self._problem = problem
        self._ranges = {
            option.cut: number
            for number, option in enumerate(problem.options)
            if option.cut is not None
        }
        self._by_first: dict[tuple[str, int], list[tuple[int, int]]] = {}
        for (chain, first, last), number in self._ranges.items():
            self._by_first.setdefault((chain, first), []).append((last, number))

    def partitions(self) -> list[Chosen]:
        """Return partitions of each chain, built from its start to its end.

        Backward reaches the start last, so the cuts at the start alone determine the peak from there on. For
        each prefix, the few partitions with the lowest peak and the quickest are kept.
        """
        partitions: list[Chosen] = []
        for chain in dict.fromkeys(name for name, _, _ in self._ranges):
            ends = {(a, b): n for (name, a, b), n in self._ranges.items() if name == chain}
            cuts = sorted({cut for pair in ends for cut in pair})
            kept: dict[int, list[Chosen]] = {cuts[0]: [()]}
            for position, end in enumerate(cuts[1:], 1):
                paths = list(kept[cuts[position - 1]])
                for begin in cuts[:position]:
                    if (begin, end) in ends:
                        paths += [(*path, ends[begin, end]) for path in kept[begin]]
                kept[end] = self._best(paths, [n for (_, b), n in ends.items() if b == end])
            partitions += kept[cuts[-1]]
        return [tuple(sorted(path)) for path in dict.fromkeys(partitions)]

    def _best(self, paths: list[Chosen], last: list[int]) -> list[Chosen]:
        """Return the paths to keep; `last`: options with the same end."""
        problem, several = self._problem, list(dict.fromkeys(paths))
        if not last:
            return several[:_KEPT]
        since = max(problem.effects[last[0]].runs)
        tails = {path: problem.peak_from(tuple(sorted(path)), since) for path in several}
        lowest = sorted(several, key=lambda path: (tails[path], problem.sum(path)))
        quickest = sorted(several, key=problem.sum)
        return list(dict.fromkeys((*lowest[:_KEPT], *quickest[:1])))

    def recut(self, have: frozenset[int]) -> Iterator[frozenset[int]]:
        """Yield sets with a range split in two, merged with the next, or with the cut between them moved."""
        ranges = {cut: n for cut, n in self._ranges.items() if n in have}
        following = {(chain, first): (last, n) for (chain, first, last), n in ranges.items()}
        for (chain, first, last), number in ranges.items():
            after = following.get((chain, last))
            end, out = (after[0], {number, after[1]}) if after else (last, {number})
            if (chain, first, end) in self._ranges:
                yield (have - out) | {self._ranges[chain, first, end]}
            for cut, head in self._by_first.get((chain, first), ()):
                if (chain, cut, end) in self._ranges:
                    yield (have - out) | {head, self._ranges[chain, cut, end]}


_BUDGETS = 20  # Arbitrary; the front has about as many points between its lowest and the original.
_TRIES = 6000  # Arbitrary; bounds the search if simulation is quick.
# Arbitrary; simulated tasks, which bounds the search to seconds if steps are long.
_WORK = 8_000_000
_FEW = 60  # Arbitrary; up to this number of options, all neighbors are simulated.
_NEAR = 10  # Arbitrary; with many options, only the ones that free most at the peak are tried.
_STARTS = 4  # Arbitrary; the starts share the tries.
_PRICES = 40  # Arbitrary; neighboring prices choose nearly the same options.
_PEAKS = 3  # Arbitrary; the peak seldom moves to a third place.
_LEAST_SECONDS = 1e-7  # Smaller differences are rounding errors of sums of seconds.
_NONE: frozenset[int] = frozenset()
# Saved seconds, the options to remove, and the options to add.
_Exchange = tuple[float, frozenset[int], frozenset[int]]


def search(problem: Problem) -> Solution:
    """Return the best choices found, the same for the same problem."""
    return Solution(_Search(problem).run(), optimal=False)


class _Search:
    def __init__(self, problem: Problem) -> None:
        self._problem = problem
        self._front = Front()
        self._chains = Chains(problem)
        size = len(problem.step.tasks) + 10 * len(problem.options)
        self._tries = max(min(_TRIES, _WORK // (size + 1)), 200)
        self._left = 0
        self._pool: Sequence[int] = range(len(problem.options))
        self._allowed = frozenset(self._pool)

    def run(self) -> Front:
        """Lower the peak, then make the choice for each budget quicker."""
        unchanged = self._try(()).peak_bytes
        pools = self._pools()
        for pool in pools:
            self._pool, self._allowed = pool, frozenset(pool)
            self._left = self._tries // (2 * len(pools))
            starts = [
                tuple(sorted(ranking[:length]))
                for ranking in self._rankings()
                for length in sorted({len(ranking) * k // 8 for k in range(9)})
            ]
            if pool is pools[0]:
                starts += [*self._chains.partitions(), *self._by_hand()]
            self._descend_from(starts)
        self._pool, self._allowed = pools[0], frozenset(pools[0])
        self._try_prices()
        lowest = self._front.lowest.peak_bytes
        for number in range(_BUDGETS):
            budget = lowest + (unchanged - lowest) * number // _BUDGETS
            if (known := self._front.within(budget)) is not None:
                self._left = max(self._tries // (2 * _BUDGETS), 40)
                self._quicken(known.chosen, budget)
        return self._front

    def _pools(self) -> list[Sequence[int]]:
        every = range(len(self._problem.options))
        names = dict.fromkeys(option.technique for option in self._problem.options)
        if len(names) == 1:
            return [every]
        # The options of each technique alone are often near the best of all.
        of = [[i for i in every if self._problem.options[i].technique == name] for name in names]
        return [every, *of]

    def _try_prices(self) -> None:
        """Try the options worth their time if a byte at the peak has a price, for many prices.

        See Everett, "Generalized Lagrange multiplier method" (Operations Research 1963). If the peak moves,
        bytes freed there count too.
        """
        tasks = [self._try(()).task]
        for _ in range(_PEAKS):
            freed = {
                i: sum(self._problem.freed(i, task) for task in tasks) / len(tasks)
                for i in self._pool
            }
            outcomes = [self._try(self._worthwhile(price, freed)) for price in self._prices(freed)]
            moved = [outcome.task for outcome in outcomes if outcome.task not in tasks]
            if not moved:
                return
            tasks.append(moved[len(moved) // 2])

    def _prices(self, freed: Mapping[int, float]) -> list[float]:
        """Return rising prices in seconds per byte: no option pays at the first, and all do at the last."""
        seconds = self._problem.seconds
        rates = sorted(seconds[i] / size for i, size in freed.items() if size > 0)
        if not rates:
            return []
        low, high = max(rates[0], 1e-30), max(rates[-1], 1e-30)
        return [low * (high / low) ** (number / _PRICES) for number in range(_PRICES + 1)]

    def _worthwhile(self, price: float, freed: Mapping[int, float]) -> Chosen:
        gains = {i: price * size - self._problem.seconds[i] for i, size in freed.items()}
        order = sorted((i for i, gain in gains.items() if gain > 0), key=lambda i: -gains[i])
        return tuple(sorted(self._problem.apart(order)))

    def _try(self, chosen: Chosen) -> Outcome:
        is_new = chosen not in self._problem.known
        outcome = self._problem.run(chosen)
        if is_new:
            self._left -= 1
            self._front.add(Point(outcome.peak_bytes, outcome.added_seconds, chosen))
        return outcome

    def _rankings(self) -> list[Chosen]:
        """Return orders of options to take, without options that exclude an earlier one."""
        problem = self._problem
        peak = self._try(()).task
        numbers = self._pool
        sizes = [sum(c.last - c.first for c in edit.claims) for edit in problem.edits]
        freed = {i: problem.freed(i, peak) for i in numbers}
        orders = [
            sorted(numbers, key=lambda i: -freed[i] / problem.seconds[i]),
            sorted(numbers, key=lambda i: -freed[i]),
        ]
        for limit in (1.0, 0.5, 0.25, 0.125, 0.0625):
            most = max(sizes, default=0) * limit
            orders.append(sorted((i for i in numbers if sizes[i] <= most), key=lambda i: -sizes[i]))
        return list(dict.fromkeys(tuple(problem.apart(order)) for order in orders))

    def _by_hand(self) -> Iterator[Chosen]:
        """Yield each block checkpointed, and every second one, so no plan is worse than these."""
        options = enumerate(self._problem.options)
        again = {option: number for number, option in options if option.technique == "recompute"}
        for blocks in checkpointed(again).values():
            yield tuple(self._problem.apart(sorted(map(again.__getitem__, blocks))))

    def _descend_from(self, starts: Iterable[Chosen]) -> None:
        """Descend from the empty set and from the lowest of the starts."""
        order = sorted(dict.fromkeys(starts), key=lambda chosen: self._try(chosen).peak_bytes)
        share = max(self._left // (_STARTS + 1), 20)
        for start in ((), *order[:_STARTS]):
            self._left = share
            self._descend(start)

    def _descend(self, chosen: Chosen) -> None:
        """Change one option at a time, always the one that lowers the peak most for its time."""
        while self._left > 0:
            now = self._try(chosen)
            lower = [
                (saved / max(then.added_seconds - now.added_seconds, 1e-6), other)
                for other in self._neighbours(chosen, now.task)
                if (saved := now.peak_bytes - (then := self._try(other)).peak_bytes) > 0
            ]
            if not lower:
                return
            chosen = max(lower)[1]

    def _neighbours(self, chosen: Chosen, peak: int) -> Iterator[Chosen]:
        have = frozenset(chosen)
        for number in self._near(have, peak):
            if number in have:
                yield tuple(sorted(have - {number}))
            else:
                yield tuple(sorted((have - self._problem.clashes[number]) | {number}))
        for other in self._chains.recut(have):
            if other <= self._allowed:
                yield tuple(sorted(other))

    def _near(self, have: frozenset[int], peak: int) -> Iterable[int]:
        """Return the options to change: all if they are few, else those that affect the peak."""
        problem, numbers = self._problem, self._pool
        if len(numbers) <= _FEW:
            return numbers
        freed = {i: f for i in numbers if i not in have and (f := problem.freed(i, peak)) > 0}
        most = sorted(freed, key=lambda i: -freed[i])[:_NEAR]
        dense = sorted(freed, key=lambda i: -freed[i] / problem.seconds[i])[:_NEAR]
        running = [i for i in have if problem.freed(i, peak) < 0 or peak in problem.effects[i].runs]
        near = (j for i in running for j in sorted(problem.clashes[i]) if j in self._allowed)
        inner = list(islice(near, 2 * _NEAR))
        return dict.fromkeys((*most, *dense, *running, *inner))

    def _quicken(self, chosen: Chosen, budget: int) -> None:
        have, better = frozenset(chosen), True
        while better and self._left > 0:
            better = False
            for _, out, into in self._exchanges(have):
                if self._left <= 0:
                    return
                left = have - out
                clashes = any(not left.isdisjoint(self._problem.clashes[i]) for i in into)
                if not out <= have or not have.isdisjoint(into) or clashes:
                    continue
                other = left | into
                if self._try(tuple(sorted(other))).peak_bytes <= budget:
                    have, better = other, True

    def _exchanges(self, have: frozenset[int]) -> list[_Exchange]:
        """Return exchanges of options that save time, the largest saving first."""
        problem, seconds = self._problem, self._problem.seconds
        exchanges = [(seconds[i], frozenset((i,)), _NONE) for i in have]
        for number in {j for i in have for j in problem.clashes[i]} - have:
            out = have & problem.clashes[number]
            exchanges.append((problem.sum(out) - seconds[number], out, frozenset((number,))))
        for other in self._chains.recut(have):
            out, into = have - other, other - have
            exchanges.append((problem.sum(out) - problem.sum(into), out, into))
        if len(problem.options) <= _FEW:  # one option for a quicker one elsewhere
            exchanges += (
                (seconds[i] - seconds[j], frozenset((i,)), frozenset((j,)))
                for i in have
                for j in range(len(problem.options))
                if seconds[i] > seconds[j] and j not in have and not problem.clashes[j] & have
            )
        worthwhile = (exchange for exchange in exchanges if exchange[0] > _LEAST_SECONDS)
        return sorted(worthwhile, key=lambda exchange: -exchange[0])


_MOST = 2048  # Sets of eleven options without exclusions, which take a moment to simulate.


def solve_exactly(problem: Problem) -> Solution | None:
    """Try every set of options without exclusions; return None if there are more than 2,048 sets.

    The sets follow each other as in a reflected binary code (Gray, US patent 2,632,058, 1953), so few options
    are switched between them, and those that change most of the step the least often.
    """
    sets: list[Chosen] = [()]
    for number in sorted(range(len(problem.options)), key=problem.changes):
        clashes = problem.clashes[number]
        sets += [(*chosen, number) for chosen in reversed(sets) if clashes.isdisjoint(chosen)]
        if len(sets) > _MOST:
            return None
    front = Front()
    for chosen in map(tuple, map(sorted, sets)):
        outcome = problem.run(chosen)
        front.add(Point(outcome.peak_bytes, outcome.added_seconds, chosen))
    return Solution(front, optimal=True)
