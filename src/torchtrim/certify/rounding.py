"""Verdict in float64: whether a change differs more than one unit in the last place moves the original."""

from __future__ import annotations

import itertools
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from torchtrim.certify import compare, noise
from torchtrim.certify.compare import (
    before_update,
    first_quantities,
    has_values,
    name_of,
    sample_of,
)
from torchtrim.certify.contest import Contest, attempt, folders, keeping, keeping_other, traced
from torchtrim.certify.noise import JudgedQuantity, RoundingNoise
from torchtrim.errors import ApplyFailed, ScriptFailed
from torchtrim.records.certificate import Verdict
from torchtrim.records.trial import Trial
from torchtrim.runner.trials import Progress

_CHAOS = 1e-8
"""Relative difference in float64, before any update, that is more than rounding in plain words: an original
that varies as much multiplies one rounding by 5e7, and nothing can be said of a change."""


_MOST_BYTES = 2**33
"""Largest bytes of one run's values that are all judged; arbitrary, written in some seconds."""
_SPARE = 16  # runs that the disk has room for: more than are made


class Judgement(NamedTuple):
    """A verdict with its reason, and the smallest relative changes that would have been seen.

    `beyond`: the differences that rounding does not explain, if float64 showed that.
    """

    verdict: Verdict
    reason: str
    sees: dict[str, float] = {}
    beyond: tuple[str, ...] = ()


def judge_in_double(
    contest: Contest, original: Trial, found: list[str], progress: Progress
) -> Judgement:
    """Decide by runs in float64 whether the change only rounds.

    A change that is small beside the first perturbed run's differences rounds; one beyond its bound does not.
    More runs decide on the rest.
    """
    first = tuple(one for one in first_quantities(original) if one not in contest.built)
    chosen = _judged_of(original, found)
    names = _with_gradients(original, chosen, first)
    with folders(3 + 2 * len(noise.STAGES[-1])) as (plain, other, *free):
        spread = _Spread(contest, names, plain, other, free, progress)
        try:
            judged = spread.judge()
        except (ApplyFailed, ScriptFailed, RuntimeError) as error:
            reason = "it differs, and the run in float64 that would tell rounding from a bug failed"
            said = str(error).strip() or type(error).__name__
            return Judgement("UNDECIDED", f"{reason}: {said.splitlines()[0]}")
    beyond = [one for one in judged if one.beyond]
    if beyond:
        return _unequal(beyond, found)
    sees = noise.sizes(judged, first)
    early = set(before_update(first))
    wild = max((one for one in judged if one.name in early), key=lambda one: one.gap, default=None)
    if wild is not None and wild.gap > _CHAOS:
        operator = _amplifier(contest, original, wild.name, progress)
        return Judgement(
            "UNDECIDED",
            f"in float64 {name_of(wild.name)} differs by {wild.gap:.1e}, and the original as much when its "
            f"numbers move by one unit in the last place{operator}",
            sees,
        )
    worst = max(judged, key=lambda one: one.gap)
    count = sum(map(has_values, found))
    which = "all differences" if len(chosen) == count else f"{len(chosen)} of {count} differences"
    return Judgement(
        "ROUNDING",
        f"in float64 {which}, at most {worst.gap:.1e}, are within what one unit in the last place "
        f"changes the original{_said(sees)}",
        sees,
    )


def _unequal(beyond: Sequence[JudgedQuantity], found: Sequence[str]) -> Judgement:
    """Return the verdict on differences that rounding does not explain, the first of the program first."""
    order = {name: number for number, name in enumerate(found)}
    beyond = sorted(beyond, key=lambda one: order.get(one.name, len(order)))
    first, names = beyond[0], tuple(one.name for one in beyond)
    step, _, name = first.name.partition("/")
    said = (
        f"in float64 {name} of step {int(step) + 1} still differs by {first.gap:.1e}, and rounding "
        f"explains {first.bound:.1e}"
    )
    if all(name_of(name).startswith("output:") for name in names) and len(names) < len(found):
        said += ", while losses, gradients and parameters agree: of a batch in another order, for example"
    return Judgement("NOT EQUAL", said, beyond=names)


def _judged_of(original: Trial, found: Sequence[str]) -> tuple[str, ...]:
    """Return the differences to judge: all, or a sample if the values of all would be too large to keep.

    A fault of a late step may be in one tensor alone, beside others that only round.
    """
    state = sum(step.state_bytes for step in original.steps)
    # Parameters, gradients and two states of an optimizer, in float64.
    whole = 4 * 2 * state * len(original.steps)
    room = shutil.disk_usage(tempfile.gettempdir()).free / _SPARE
    if whole <= min(_MOST_BYTES, room):
        return tuple(filter(has_values, found))
    return sample_of([*found])


def _said(sees: dict[str, float]) -> str:
    parts = [f"{size:.0e} of {kind}" for kind, size in sees.items()]
    return f"; would have seen {', '.join(parts)}" if parts else ""


class _Spread:
    """The runs in float64 of a contest, and how far the perturbed ones lie apart."""

    def __init__(
        self,
        contest: Contest,
        names: tuple[str, ...],
        plain: Path,
        other: Path,
        free: Sequence[Path],
        progress: Progress,
    ) -> None:
        self._contest, self._names, self._progress = contest, names, progress
        self._plain, self._other, self._free = plain, other, [*free]
        self._moved: tuple[dict[int, Path], dict[int, Path]] = {}, {}
        self._noise = RoundingNoise(names, plain, other)
        self._again: Path | None = None
        self._equals = True

    def judge(self) -> list[JudgedQuantity]:
        """Return the judgement of each quantity.

        The original's runs come first, and the other's where those do not explain a difference.
        """
        self._run(False, self._plain)
        self._run(True, self._other)
        judged: list[JudgedQuantity] = []
        needed = False  # the other's runs
        for seeds in noise.STAGES:
            for both in sorted({needed, True}):
                if both and not self._repeats(judged):
                    return judged
                judged = self._perturbed(seeds, both, noise.ALL)
                if all(one.gap <= noise.clear(seeds) * one.bound for one in judged):
                    return judged
                judged = self._perturbed(seeds, both)
                if not any(one.beyond for one in judged):
                    needed = both
                    break
            else:
                return judged
        return judged

    def _perturbed(self, seeds: Sequence[int], both: bool, runs: int = 0) -> list[JudgedQuantity]:
        """Judge by perturbed runs of the original, or of both programs, making missing ones."""
        for planned, seed in itertools.product((False, True) if both else (False,), seeds):
            if seed not in self._moved[planned]:
                folder = self._moved[planned][seed] = self._free.pop()
                self._run(planned, folder, seed)
        moved, others = ({seed: of[seed] for seed in seeds if seed in of} for of in self._moved)
        return self._noise.judged(moved, others, runs)

    def _repeats(self, judged: Sequence[JudgedQuantity]) -> bool:
        """Return True if the other program equals itself, up to the rounding of the original.

        Random draws are not rounding, though its perturbed runs are as far apart.
        """
        if self._again is None:
            self._again = self._free.pop()
            self._run(True, self._again)
            self._equals = self._noise.repeats(self._again, judged)
        return self._equals

    def _run(self, planned: bool, folder: Path, seed: int = 0) -> None:
        contest, names = self._contest, self._names
        request = keeping(contest.request, names, double=True)
        request = keeping_other(contest, names, double=True) if planned else request
        if seed:
            request = msgspec.structs.replace(request, nudged=seed)
        again = f"nudged {seed}" if folder != self._again else "once more"
        attempt(contest, planned, request, folder, self._progress, again=again)


def _with_gradients(
    trial: Trial, found: tuple[str, ...], first: tuple[str, ...]
) -> tuple[str, ...]:
    """Return the names, and those of all gradients of parameters and states that are found in later steps."""
    names = tuple(dict.fromkeys((*found, *first)))
    updated = (name_of(name) for name in {*found} - {*first} if compare.is_updated(name))
    owners = {noise.owner_of(name) for name in updated}
    gradients = [
        f"{number}/{name}"
        for number, step in enumerate(trial.steps)
        for name in step.digests
        if name.startswith("gradient:") and noise.owner_of(name) in owners
    ]
    return tuple(dict.fromkeys((*names, *gradients)))


def _amplifier(contest: Contest, original: Trial, name: str, progress: Progress) -> str:
    """Return the first operator that one rounding changes visibly, as `", from aten::tan at a.py:3 on"`."""
    step = int(name.partition("/")[0])
    still = msgspec.structs.replace(traced(contest.request, step, double=True), round_trip=False)
    moved = msgspec.structs.replace(still, nudged=noise.SEEDS[0])
    with folders(2) as (one, two):
        try:
            plain = attempt(contest, False, still, one, progress)
            other = attempt(contest, False, moved, two, progress)
        except (ApplyFailed, ScriptFailed, RuntimeError):
            return ""
    spot = compare.amplifier(plain, other, _CHAOS)
    if spot is None:
        return ""
    place = f" at {Path(spot.path).name}:{spot.line}" if spot.path else ""
    return f", first visible after {spot.op}{place}"
