"""One set of rewrites, tried: the script is run with them, and what speaks against them is found."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from torchtrim.analysis.prices import device_of
from torchtrim.analysis.syncs import waits_in
from torchtrim.analysis.user_source import line_of
from torchtrim.costs.roofline import estimate
from torchtrim.costs.syncs import price_syncs
from torchtrim.errors import ScriptFailed
from torchtrim.records.certificate import Certificate
from torchtrim.records.profile import Profile, is_emulated
from torchtrim.records.trial import Trial
from torchtrim.rewriter.edits import patch
from torchtrim.rewriter.fix import Match, Rewrite
from torchtrim.source.facts import FixRefused

Waits = Counter[tuple[str, int]]


_DEARER = 1.002
Region = tuple[str, int, int]


class Attempt(NamedTuple):
    """What came of running rewrites. `left`: the syncs left at each; `wrong`: why they may not stay."""

    rewrites: tuple[Rewrite, ...]
    texts: Mapping[str, str]
    wrong: str = ""
    left: tuple[int, ...] = ()
    regions: tuple[tuple[Region, ...], ...] = ()
    trial: Trial | None = None
    certificate: Certificate | None = None


def attempt(
    rewrites: Sequence[Rewrite],
    texts: Mapping[str, str],
    before: Profile,
    project: Path,
    run: Callable[[dict[str, str]], Trial],
) -> Attempt:
    """Run the texts with the rewrites in them, and see whether what they fix synchronizes less."""
    new = dict(texts)
    regions: dict[int, tuple[Region, ...]] = {}
    try:
        for source in {
            id(rewrite.match.source): rewrite.match.source for rewrite in rewrites
        }.values():
            own = [rewrite for rewrite in rewrites if rewrite.match.source is source]
            patched = patch(source, own)
            new[source.path] = patched.text
            for rewrite, spans in zip(own, patched.regions, strict=True):
                regions[id(rewrite)] = tuple((source.path, *span) for span in spans)
        trial = run(new)
    except (FixRefused, ScriptFailed) as error:
        return Attempt(tuple(rewrites), new, f"with it the script fails: {error}")
    found = Attempt(
        tuple(rewrites),
        new,
        regions=tuple(regions[id(rewrite)] for rewrite in rewrites),
        trial=trial,
    )
    if trial.profile is None:
        return found._replace(wrong="with it the script did not come to a recorded step")
    left, wrong = _waits_left(found, before, trial.profile, project)
    return found._replace(left=left, wrong=wrong)


def grown_ms(found: Attempt, before: Profile, project: Path) -> list[float]:
    """By how much longer than what it replaces each rewrite of an attempt keeps the device, modelled."""
    pairs = [
        (_own_region(rewrite.match), spans)
        for rewrite, spans in zip(found.rewrites, found.regions, strict=True)
    ]
    return growth_ms(before, profile_of(found.trial), pairs, project)


def profile_of(trial: Trial | None) -> Profile:
    """The profile of a trial that is known to have one."""
    assert trial is not None
    assert trial.profile is not None
    return trial.profile


def _waits_left(
    found: Attempt, before: Profile, after: Profile, project: Path
) -> tuple[tuple[int, ...], str]:
    was, now = waiting_lines(before, project), waiting_lines(after, project)
    left = tuple(sum(_within(now, span) for span in spans) for spans in found.regions)
    for rewrite, count in zip(found.rewrites, left, strict=True):
        if count >= waits_of(rewrite.match, was):
            return left, "the line synchronizes as often as before"
    if sum(now.values()) >= sum(was.values()):
        return left, "the step synchronizes as often as before: the sync has moved"
    return left, ""


def waiting_lines(profile: Profile, project: Path) -> Waits:
    """How often a step synchronizes at each line of the project's files, by absolute path."""
    found: Waits = Counter()
    for path, line, _, _, count in waits_in(profile):
        absolute = (project / path).resolve()
        if absolute.is_relative_to(project) and line > 0:
            found[str(absolute), line] += count
    return found


def waits_of(match: Match, waits: Waits) -> int:
    """How often a step synchronizes at the match's own lines."""
    return _within(waits, _own_region(match))


def _own_region(match: Match) -> Region:
    return match.source.path, *match.lines


def _within(waits: Waits, region: Region) -> int:
    path, first, last = region
    return sum(n for (p, line), n in waits.items() if p == path and first <= line <= last)


class ModelledStep(NamedTuple):
    """A step on the emulated device, in ms: how long it takes, and how long the device is busy in it."""

    step_ms: float
    busy_ms: float


def modelled(profile: Profile) -> ModelledStep | None:
    """The step as it is modelled; None where no device was emulated."""
    if not is_emulated(profile.device):
        return None
    found = price_syncs(profile, device_of(profile))
    return ModelledStep(found.step_ms, found.device_busy_ms)


def costs_more(after: Profile, before: Profile) -> str:
    """Why fixes are not worth it together, as a dense form may cost more than its sync; empty where they are.

    They are not where the device alone is busy longer with them than the whole step took, its waits
    included. The host's share is left out: it is modelled for each operator alike, though selecting by a mask
    launches several kernels.
    """
    now, was = modelled(after), modelled(before)
    if now is None or was is None or now.busy_ms <= _DEARER * was.step_ms:
        return ""
    return (
        f"the device alone is busy for {now.busy_ms:.3g} ms with the fixes, and the step took "
        f"{was.step_ms:.3g} ms without, modelled"
    )


def growth_ms(
    before: Profile,
    after: Profile,
    regions: Sequence[tuple[Region, Sequence[Region]]],
    project: Path,
) -> list[float]:
    """By how much longer each place keeps the device, backward included; 0 where none was emulated.

    A place is a region before, and what it became: paths with a first and a last line.
    """
    if not is_emulated(before.device):
        return [0.0] * len(regions)
    was, now = _by_line(before, project), _by_line(after, project)
    return [
        1e3 * (sum(_seconds_within(now, one) for one in new) - _seconds_within(was, old))
        for old, new in regions
    ]


def _by_line(profile: Profile, project: Path) -> dict[tuple[str, int], float]:
    """Seconds of the device by the absolute path and the line that asked for them."""
    found: dict[tuple[str, int], float] = {}
    seconds = estimate(profile, device_of(profile)).device_seconds
    for number, time in enumerate(seconds):
        line = line_of(profile, number)
        place = str((project / line.path).resolve()), line.line
        found[place] = found.get(place, 0.0) + time
    return found


def _seconds_within(times: dict[tuple[str, int], float], region: Region) -> float:
    path, first, last = region
    return sum(time for (p, line), time in times.items() if p == path and first <= line <= last)
