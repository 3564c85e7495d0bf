"""Options that cut a chain of modules into ranges: whole partitions of it, and cuts that move."""

from __future__ import annotations

from collections.abc import Iterator

from torchtrim.planner.problem import Chosen, Problem

_KEPT = 4


class Chains:
    """The ranges among the options of a problem."""

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
        """Ways to cut each chain, found from its beginning to its end.

        Backward comes to the beginning last, so how a beginning is cut settles the peak from there on,
        whatever follows. Of each beginning the few with the lowest peak, and the quickest, are kept.
        """
        found: list[Chosen] = []
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
            found += kept[cuts[-1]]
        return [tuple(sorted(path)) for path in dict.fromkeys(found)]

    def _best(self, paths: list[Chosen], last: list[int]) -> list[Chosen]:
        """The paths to keep; `last`: options that end where the paths do."""
        problem, several = self._problem, list(dict.fromkeys(paths))
        if not last:
            return several[:_KEPT]
        since = max(problem.effects[last[0]].runs)
        tails = {path: problem.peak_from(tuple(sorted(path)), since) for path in several}
        lowest = sorted(several, key=lambda path: (tails[path], problem.sum(path)))
        quickest = sorted(several, key=problem.sum)
        return list(dict.fromkeys((*lowest[:_KEPT], *quickest[:1])))

    def recut(self, have: frozenset[int]) -> Iterator[frozenset[int]]:
        """A range split in two, merged with the next, or with the cut between them moved."""
        ranges = {cut: n for cut, n in self._ranges.items() if n in have}
        following = {(chain, first): (last, n) for (chain, first, last), n in ranges.items()}
        for (chain, first, last), number in ranges.items():
            after = following.get((chain, last))
            end, out = (after[0], {number, after[1]}) if after else (last, {number})
            if (chain, first, end) in self._ranges:
                yield (have - out) | {self._ranges[chain, first, end]}
            for cut, one in self._by_first.get((chain, first), ()):
                if (chain, cut, end) in self._ranges:
                    yield (have - out) | {one, self._ranges[chain, cut, end]}
