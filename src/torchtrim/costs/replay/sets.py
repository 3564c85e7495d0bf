"""What the whole gains when sites no longer wait: each alone, and in sets, since waits move."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import combinations

from torchtrim.costs.replay.engine import Replayed, replay
from torchtrim.costs.replay.one_stream import OneStream
from torchtrim.costs.replay.program import ReplayProgram

_STEPS_A_REPORT = 600_000  # Arbitrary; bounds the replays of a report to seconds.
_FEWEST_REPLAYS = 16  # All pairs of five, the five alone, and all together.
_PAIRS = 5  # Ten pairs; grown sets cover what longer lists of pairs would.
_MOST_SETS = 5  # Arbitrary; as many rows as a report shows.
_NOTHING_US = 0.5  # Below what a profiler's clock resolves: rounding of sums, no gain.
_WORTH = 1.01  # A set that gains one per cent more than a smaller one says nothing new.


@dataclass(kw_only=True)
class Prices:
    """Microseconds that the whole gains: `alone` by site, `sets` with the largest gain first.

    `unpriced` is how many sites there was no time to try alone.
    """

    base: Replayed
    alone: dict[int, float] = field(default_factory=dict)
    sets: list[tuple[frozenset[int], float]] = field(default_factory=list)
    together: float = 0.0
    unpriced: int = 0


def price(
    program: ReplayProgram | OneStream, sites: Sequence[int], *, apart: Sequence[int] = ()
) -> Prices:
    """Price the sites, which come with the longest wait first; those in `apart` only alone.

    Sets are all pairs of the five longest waits, sets that grow by the site that then gains most, and
    all sites together. The number of replays is bounded by the length of the program.
    """
    base = replay(program)
    left = max(_FEWEST_REPLAYS, _STEPS_A_REPORT // max(1, len(program.steps)))
    known: dict[frozenset[int], float] = {frozenset(): 0.0}

    def saves(chosen: frozenset[int]) -> float:
        nonlocal left
        if chosen not in known:
            left -= 1
            gain = base.span - replay(program, chosen).span
            known[chosen] = gain if gain > _NOTHING_US else 0.0
        return known[chosen]

    together = saves(frozenset(sites)) if sites else 0.0
    alone = {}
    for site in (*sites, *apart):
        if left <= 0:
            break
        alone[site] = saves(frozenset((site,)))
    for pair in combinations(sites[:_PAIRS], 2):
        if left > 0:
            saves(frozenset(pair))
    _grow(list(alone.keys() & set(sites)), saves, together, lambda: left > 0)
    wanted = frozenset(sites)
    sets = {chosen: gain for chosen, gain in known.items() if chosen and chosen <= wanted}
    return Prices(
        base=base,
        alone=alone,
        sets=_ranked(sets),
        together=together,
        unpriced=len(sites) + len(apart) - len(alone),
    )


def _grow(
    sites: list[int],
    saves: Callable[[frozenset[int]], float],
    together: float,
    may: Callable[[], bool],
) -> None:
    """Add the site that gains most to the set, until the set gains as much as all."""
    chosen: frozenset[int] = frozenset()
    while may() and len(chosen) < len(sites) and saves(chosen) * _WORTH < together:
        tried = {}
        for site in sites:
            if site not in chosen and may():
                tried[site] = saves(chosen | {site})
        if not tried:
            return
        chosen |= {max(tried, key=lambda site: (tried[site], -site))}


def _ranked(sets: dict[frozenset[int], float]) -> list[tuple[frozenset[int], float]]:
    """The largest gain first, of each size one; left out where one of its own subsets gains as much."""
    ranked: list[tuple[frozenset[int], float]] = []
    sizes: set[int] = set()
    for chosen, gain in sorted(sets.items(), key=lambda item: (-item[1], len(item[0]))):
        smaller = (g for other, g in sets.items() if other < chosen)
        if gain > 0 and len(chosen) not in sizes and all(gain > g * _WORTH for g in smaller):
            ranked.append((chosen, gain))
            sizes.add(len(chosen))
    return ranked[:_MOST_SETS]
