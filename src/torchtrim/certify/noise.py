"""Test of rounding: a change against what one unit in the last place changes the original, in float64."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from torchtrim.certify.compare import difference, group_of, is_kept, is_updated, load_kept

CHANCE = 1e-4
"""Chance that a certificate calls a change that only rounds unequal, over all its quantities."""
SEEDS = (1, -1, 2, 3)
"""Seeds of perturbed runs. Seed -1 moves everything the other way, so that where the sign of a sum is
rounding alone, one of the two has the other sign; it tells nothing else about the spread."""
STAGES = ((1,), SEEDS, (*SEEDS, 4, 5))
"""Seeds of the runs that decide, if those before have not: the tail of Student's t of one run is so long
that only a gross fault is beyond it, of three it is 200 spreads, of five 40."""
SHARE = torch.finfo(torch.float64).eps
"""One unit in the last place of the largest value of a kind: what a value near zero is rounded from."""
_KINDS = ("loss", "output", "gradient", "buffer")


def clear(seeds: Sequence[int]) -> float:
    """Return the share of the bound within which these runs show that all runs would agree.

    The root mean square of n differences is at least that of m of them times the root of m / n.
    """
    return math.sqrt(spreads(seeds) / ALL)


def spreads(seeds: Sequence[int]) -> int:
    """Return the number of independent runs."""
    return len({abs(seed) for seed in seeds})


ALL = spreads(STAGES[-1])


def factor(quantities: int, runs: int, chance: float = CHANCE) -> float:
    """Return how many times the spread of the perturbed runs a quantity may differ.

    Rounding errors are sums of many small parts, so normal; the spread is estimated from few runs, so the
    ratio follows Student's t with as many degrees of freedom. Its tail is bounded by the leading term, which
    is the larger value. A tensor's largest of many errors has a lighter tail than a single error.
    """
    each = chance / (len(STAGES) * max(quantities, 1))
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


class RoundingNoise:
    """The kept values of a certificate's runs in float64: the original's, `plain`, and the other program's.

    Differences of whole values are computed once, however many runs follow.
    """

    def __init__(self, names: Sequence[str], plain: Path, other: Path) -> None:
        self._number = {name: number for number, name in enumerate(names)}
        self._plain, self._other = plain, other
        self._apart: dict[tuple[str, Path, Path], tuple[float, float]] = {}
        self._nearest: dict[tuple[str, Path], float] = {}
        self._owned: dict[str, list[str]] = {}
        self._gradients: dict[str, list[str]] = {}
        for name in names:
            label = name.partition("/")[2]
            self._owned.setdefault(owner_of(label) if is_updated(name) else "", []).append(name)
            if label.startswith("gradient:"):
                self._gradients.setdefault(owner_of(label), []).append(name)

    def judged(
        self, moved: Mapping[int, Path], others: Mapping[int, Path], runs: int = 0
    ) -> list[JudgedQuantity]:
        """Judge every quantity that one of the programs computed.

        `moved`: folders of perturbed runs of the original, by seed; `others`: those of the other program, if
        they ran: a sound program may round more than the original does. `runs`: independent runs that the
        bound is for, by default those there are.
        """
        most = factor(len(self._number), runs or spreads((*moved,)))
        found: dict[str, tuple[float, float]] = {}
        scales: dict[str, float] = {}
        for owner, names in self._owned.items():
            folders = (*moved.values(), *others.values()) if owner else ()
            blurred = {one: self._blurred(owner, one, most) for one in folders}
            for name in filter(self._computed, names):
                masks = {one: _until(name, steps) for one, steps in blurred.items()}
                found[name] = self._measured(name, moved, others, masks)
                _, scale = self._difference(name, self._plain, self._other)
                scales[group_of(name)] = max(scales.get(group_of(name), 0.0), scale)
        return [
            _judged(name, *found[name], most, scales[group_of(name)])
            for name in self._number
            if name in found
        ]

    def repeats(self, again: Path, judged: Sequence[JudgedQuantity]) -> bool:
        """Return True if the other program's second run is as near to its first as rounding explains."""
        for one in judged:
            gap, scale = self._difference(one.name, self._other, again)
            if gap and gap / max(scale, math.ulp(0.0)) > one.bound:
                return False
        return True

    def _computed(self, name: str) -> bool:
        folders = self._plain, self._other
        return any(is_kept(folder, self._number[name]) for folder in folders)

    def _measured(
        self,
        name: str,
        moved: Mapping[int, Path],
        others: Mapping[int, Path],
        masks: Mapping[Path, list[torch.Tensor]],
    ) -> tuple[float, float]:
        """Return the difference of the programs, and the spread of the perturbed runs.

        The difference is without the elements that any run blurs, a run's without those that it blurs itself:
        so more runs make the difference no larger, and the sum of their squares no smaller.
        """
        every = [mask for one in masks.values() for mask in one]
        gap, _ = self._difference(name, self._plain, self._other, every)
        found = []
        for plain, runs in ((self._plain, moved), (self._other, others)):
            gaps = {
                seed: self._difference(name, plain, folder, masks.get(folder, ()))[0]
                for seed, folder in runs.items()
            }
            found.append(spread(gaps))
        return gap, math.hypot(*found)

    def _difference(
        self, name: str, one: Path, other: Path, blurred: Sequence[torch.Tensor] = ()
    ) -> tuple[float, float]:
        """Return the largest difference of two runs where neither is blurred, and the largest magnitude."""
        key = name, one, other
        if key in self._apart and not blurred:
            return self._apart[key]
        a, b = self._load(one, name), self._load(other, name)
        if a is not None and b is not None:
            fitting = [mask for mask in blurred if mask.shape == a.shape == b.shape]
            if fitting:
                keep = ~functools.reduce(torch.logical_or, fitting)
                return difference(a[keep], b[keep])
        self._apart[key] = difference(a, b)
        return self._apart[key]

    def _blurred(self, owner: str, folder: Path, most: float) -> dict[int, torch.Tensor]:
        """Return masks of the elements whose gradient is rounding alone up to a step, as this run shows it.

        Updates that use little more than a gradient's sign, as Adam's first, make any difference there as
        large as the learning rate. The gradients themselves are judged.
        """
        masks: dict[int, torch.Tensor] = {}
        found: torch.Tensor | None = None
        for name in sorted(self._gradients.get(owner, ()), key=_step_of):
            if self._nearest.get((name, folder), 0.0) > most:
                continue
            ratio = self._steadiness(name, folder)
            if ratio is not None and len(ratio):
                nearest = self._nearest[name, folder] = float(ratio.min())
                if nearest <= most and (found is None or found.shape == ratio.shape):
                    found = ratio <= most if found is None else found | (ratio <= most)
                    masks[_step_of(name)] = found
        return masks

    def _steadiness(self, name: str, folder: Path) -> torch.Tensor | None:
        """Return how many times its differences each element of a gradient is, inf without any."""
        plain = self._load(self._plain, name)
        if plain is None:
            return None
        apart = torch.zeros_like(plain, dtype=torch.float64)
        for one in (self._other, folder):
            value = self._load(one, name)
            if value is not None and value.shape == plain.shape:
                apart = torch.maximum(apart, (value - plain).abs())
        return torch.where(apart > 0, plain.abs() / apart, math.inf)

    def _load(self, folder: Path, name: str) -> torch.Tensor | None:
        return load_kept(folder, self._number[name])


def _step_of(name: str) -> int:
    return int(name.partition("/")[0])


def _until(name: str, masks: Mapping[int, torch.Tensor]) -> list[torch.Tensor]:
    """Return the last mask of the steps up to a quantity's own: later gradients have not changed it."""
    steps = [step for step in masks if step <= _step_of(name)]
    return [masks[max(steps)]] if steps else []


def _judged(name: str, gap: float, spread: float, most: float, scale: float) -> JudgedQuantity:
    if not scale:
        return JudgedQuantity(name, math.inf if gap else 0.0, 0.0)
    return JudgedQuantity(name, gap / scale, limit(spread, most, scale) / scale)


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
