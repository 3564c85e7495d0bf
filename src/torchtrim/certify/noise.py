"""Test of rounding: a change against what one unit in the last place changes the original, in float64."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from torchtrim.certify.compare import difference, group_of, is_updated, load_kept

CHANCE = 1e-4
"""Chance that a certificate calls a change that only rounds unequal, over all its quantities."""
FIRST = (1,)
"""Seeds of the perturbed run that decides alone whether a change is far too large."""
SEEDS = (1, -1, 2, 3)
"""Seeds of all perturbed runs. Seed -1 moves everything the other way, so that where the sign of a sum is
rounding alone, one of the two has the other sign; it tells nothing else about the spread."""
CLEAR = 0.5
"""Share of the bound: if no quantity differs by more in the first run, the others are not needed. The root
mean square of three runs is at least 0.57 of the first run's difference, so the bound is not undercut."""
_STAGES = 2  # that share the chance of error
SHARE = torch.finfo(torch.float64).eps
"""One unit in the last place of the largest value of a kind: what a value near zero is rounded from."""
_KINDS = ("loss", "output", "gradient", "buffer")


def spreads(seeds: Sequence[int]) -> int:
    """Return the number of independent runs."""
    return len({abs(seed) for seed in seeds})


def factor(quantities: int, runs: int, chance: float = CHANCE) -> float:
    """Return how many times the spread of the perturbed runs a quantity may differ.

    Rounding errors are sums of many small parts, so normal; the spread is estimated from few runs, so the
    ratio follows Student's t with as many degrees of freedom. Its tail is bounded by the leading term, which
    is the larger value. A tensor's largest of many errors has a lighter tail than a single error.
    """
    each = chance / (_STAGES * max(quantities, 1))
    beta = math.gamma(runs / 2) * math.gamma(0.5) / math.gamma((runs + 1) / 2)
    return math.sqrt(runs / (each * runs / 2 * beta) ** (2 / runs))


def spread(gaps: Mapping[int, float]) -> float:
    """Return the root mean square of perturbed runs' differences; a seed and its negative count once."""
    pairs: dict[int, float] = {}
    for seed, gap in gaps.items():
        if math.isfinite(gap):
            pairs[abs(seed)] = max(pairs.get(abs(seed), 0.0), gap)
    return math.sqrt(sum(gap * gap for gap in pairs.values()) / len(pairs)) if pairs else 0.0


def limit(spread: float, most: float, scale: float = 1.0) -> float:
    """Return the largest difference that is rounding: `most` spreads, or last places of `scale`."""
    return most * max(spread, SHARE * scale)


class JudgedQuantity(NamedTuple):
    """Difference of a quantity and the bound of rounding, both relative to the largest value of its kind."""

    name: str
    gap: float
    bound: float

    @property
    def beyond(self) -> bool:
        """True if the difference is larger than rounding explains."""
        return self.gap > self.bound


class _Values(NamedTuple):
    """Values of a quantity: the original's, the other's, and those of perturbed runs."""

    plain: torch.Tensor | None
    other: torch.Tensor | None
    moved: list[torch.Tensor | None]


class RoundingNoise:
    """The kept values of a certificate's runs in float64.

    `moved`: folders of the perturbed runs of the original, by seed; `others`: those of the other program, if
    they ran: a sound program may round more than the original does. `runs`: independent runs that the bound
    is for, by default those there are.
    """

    def __init__(
        self,
        names: Sequence[str],
        plain: Path,
        other: Path,
        moved: dict[int, Path],
        others: dict[int, Path],
        runs: int = 0,
    ) -> None:
        self._number = {name: number for number, name in enumerate(names)}
        self._plain, self._other = plain, other
        self._moved, self._others = moved, others
        self._factor = factor(len(names), runs or spreads((*moved,)))
        self._blurred: dict[str, torch.Tensor | None] = {}

    def judged(self) -> list[JudgedQuantity]:
        """Judge every quantity that one of the programs computed."""
        gaps: dict[str, tuple[float, float]] = {}
        scales: dict[str, float] = {}
        for name in self._number:
            if (found := self._measured(name)) is not None:
                gap, spread, scale = found
                gaps[name] = gap, spread
                group = group_of(name)
                scales[group] = max(scales.get(group, 0.0), scale)
        return [
            self._judged(name, gap, spread, scales[group_of(name)])
            for name, (gap, spread) in gaps.items()
        ]

    def _judged(self, name: str, gap: float, spread: float, scale: float) -> JudgedQuantity:
        bound = limit(spread, self._factor, scale)
        if not scale:
            return JudgedQuantity(name, math.inf if gap else 0.0, 0.0)
        return JudgedQuantity(name, gap / scale, bound / scale)

    def _measured(self, name: str) -> tuple[float, float, float] | None:
        plain, other = self._load(self._plain, name), self._load(self._other, name)
        if plain is None and other is None:
            return None
        keep = self._steady(name) if is_updated(name) else None
        if keep is not None and plain is not None and other is not None:
            if plain.shape == other.shape == keep.shape:
                plain, other = plain[keep], other[keep]
            else:
                keep = None
        gap, scale = difference(plain, other)
        own = self._spread(name, plain, self._moved, keep)
        reference = self._load(self._other, name)
        reference = reference[keep] if keep is not None and reference is not None else reference
        return gap, math.hypot(own, self._spread(name, reference, self._others, keep)), scale

    def _spread(
        self,
        name: str,
        plain: torch.Tensor | None,
        runs: dict[int, Path],
        keep: torch.Tensor | None,
    ) -> float:
        """Return the root mean square of the largest differences of perturbed runs."""
        found: dict[int, float] = {}
        for seed, folder in runs.items():
            value = self._load(folder, name)
            if keep is not None and value is not None and value.shape == keep.shape:
                value = value[keep]
            found[seed], _ = difference(plain, value)
        return spread(found)

    def _steady(self, name: str) -> torch.Tensor | None:
        """Return a mask of the elements whose gradient is more than rounding, None if there is none.

        Updates that use little more than a gradient's sign, as Adam's first, make any difference in the
        others as large as the learning rate. The gradients themselves are judged.
        """
        owner = owner_of(name.partition("/")[2])
        if owner not in self._blurred:
            self._blurred[owner] = self._blurred_of(owner)
        blurred = self._blurred[owner]
        return None if blurred is None or not bool(blurred.any()) else ~blurred

    def _blurred_of(self, owner: str) -> torch.Tensor | None:
        found: torch.Tensor | None = None
        for name in self._number:
            label = name.partition("/")[2]
            if label.startswith("gradient:") and owner_of(label) == owner:
                one = self._blurred_in(name)
                if one is not None and (found is None or found.shape == one.shape):
                    found = one if found is None else found | one
        return found

    def _blurred_in(self, name: str) -> torch.Tensor | None:
        plain = self._load(self._plain, name)
        if plain is None:
            return None
        apart = torch.zeros_like(plain)
        for folder in (self._other, *self._moved.values(), *self._others.values()):
            value = self._load(folder, name)
            if value is not None and value.shape == plain.shape:
                apart = torch.maximum(apart, (value - plain).abs())
        return (apart > 0) & (plain.abs() <= self._factor * apart)

    def _load(self, folder: Path, name: str) -> torch.Tensor | None:
        return load_kept(folder, self._number[name])


def sizes(judged: Iterable[JudgedQuantity], before: Sequence[str]) -> dict[str, float]:
    """Return the smallest relative change of each kind of quantity that would have been seen.

    Of the quantities before the first update: a change is seen in any of them, so the largest bound counts.
    """
    found: dict[str, float] = {}
    wanted = set(before)
    for one in judged:
        kind = one.name.partition("/")[2].partition(":")[0]
        if one.name in wanted and kind in _KINDS:
            found[kind] = max(found.get(kind, 0.0), one.bound)
    return found


def owner_of(label: str) -> str:
    """Return `"Net.weight"` for its gradient, `"gradient:Net.weight (2)"`, and for its optimizer state."""
    quantity, _, rest = label.partition(":")
    if quantity == "optimizer state":
        return rest.partition(".")[2].rpartition(".")[0].rpartition(".")[0]
    return rest.partition(" (")[0]
