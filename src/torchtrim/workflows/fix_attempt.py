"""An attempt at a set of rewrites: a run of the script with them, and the reasons against them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, TypeVar

from torchtrim.analysis.prices import device_of
from torchtrim.analysis.syncs import CODES, code_of, line_of_sync, waits_in
from torchtrim.analysis.user_source import CodeLine, line_of
from torchtrim.core.units import counted, format_seconds
from torchtrim.costs.roofline import estimate
from torchtrim.costs.syncs import price_syncs
from torchtrim.errors import ScriptFailed
from torchtrim.records.certificate import Certificate
from torchtrim.records.profile import Profile, is_emulated
from torchtrim.records.report import WaitCost
from torchtrim.records.trial import Trial
from torchtrim.rewriter.edits import patch
from torchtrim.rewriter.fix import Match, Rewrite
from torchtrim.source.facts import FixRefused

Waits = Counter[tuple[str, int]]


_Amount = TypeVar("_Amount", int, float)
_WORTHY = 0.1  # of a step; arbitrary
_DEARER = 1.002  # of the step's time: above the rounding of modelled times
Region = tuple[str, int, int]
"""A path, with a first and a last line."""


class Attempt(NamedTuple):
    """Result of a run with rewrites. `left`: remaining syncs of each; `wrong`: the reason to revert them."""

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
    """Run the texts with the rewrites, and check that their places synchronize less."""
    new = dict(texts)
    regions: dict[int, tuple[Region, ...]] = {}
    sources = {id(rewrite.match.source): rewrite.match.source for rewrite in rewrites}
    try:
        for source in sources.values():
            own = [rewrite for rewrite in rewrites if rewrite.match.source is source]
            patched = patch(source, own)
            new[source.path] = patched.text
            for rewrite, spans in zip(own, patched.regions, strict=True):
                regions[id(rewrite)] = tuple((source.path, *span) for span in spans)
        trial = run(new)
    except (FixRefused, ScriptFailed) as error:
        return Attempt(tuple(rewrites), new, f"with it the script fails: {error}")
    own_regions = tuple(regions[id(rewrite)] for rewrite in rewrites)
    tried = Attempt(tuple(rewrites), new, regions=own_regions, trial=trial)
    if trial.profile is None:
        return tried._replace(wrong="with it the script did not reach a recorded step")
    left, wrong = _waits_left(tried, before, trial.profile, project)
    return tried._replace(left=left, wrong=wrong)


def grown_ms(tried: Attempt, before: Profile, project: Path) -> list[float]:
    """Return the ms that each rewrite adds on the device, modelled, backward included.

    Each is 0 without an emulated device.
    """
    if not is_emulated(before.device):
        return [0.0] * len(tried.rewrites)
    was, now = _by_line(before, project), _by_line(profile_of(tried.trial), project)
    return [
        1e3 * (sum(_within(now, span) for span in spans) - _within(was, _own_region(rewrite.match)))
        for rewrite, spans in zip(tried.rewrites, tried.regions, strict=True)
    ]


def profile_of(trial: Trial | None) -> Profile:
    """Return the profile of a trial that must have one."""
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
    """Count a step's syncs at each line of the project's files, by absolute path."""
    found: Waits = Counter()
    for path, line, _, _, count in waits_in(profile):
        absolute = (project / path).resolve()
        if absolute.is_relative_to(project) and line > 0:
            found[str(absolute), line] += count
    return found


def _absolute(line: CodeLine, project: Path) -> tuple[str, int]:
    return str((project / line.path).resolve()), line.line


def waits_of(match: Match, waits: Waits) -> int:
    """Count a step's syncs at the match's own lines."""
    return _within(waits, _own_region(match))


def _own_region(match: Match) -> Region:
    return match.source.path, *match.lines


def _within(amounts: Mapping[tuple[str, int], _Amount], region: Region) -> _Amount:
    path, first, last = region
    return sum(n for (p, line), n in amounts.items() if p == path and first <= line <= last)


def modelled(profile: Profile) -> WaitCost | None:
    """Return the step's modelled times, None without an emulated device."""
    return price_syncs(profile, device_of(profile)).cost if is_emulated(profile.device) else None


def costs_more(after: Profile, before: Profile) -> str:
    """Return the reason why the fixes together do not pay off; empty if they do.

    Dense forms may cost more: fixes do not pay off if the device alone is busy longer with them than the
    whole step took, waits included. The host's share is ignored: the model has one time for all operators,
    but a selection by a mask launches several kernels.
    """
    now, was = modelled(after), modelled(before)
    if now is None or was is None or now.device_busy_ms <= _DEARER * was.step_ms:
        return ""
    return (
        f"the device alone is busy for {now.device_busy_ms:.3g} ms with the fixes, and the step took "
        f"{was.step_ms:.3g} ms without, modelled"
    )


def unworthy(original: Trial, project: Path) -> str:
    """Return a sentence on syncs too cheap to prove fixes unasked, or an empty string.

    They cost less than the steps differ by, or less than a tenth of a step: a proof takes several runs.

    Empty if the script's own lines have no syncs, or if their cost is not known. Times are of the device that
    the profile is of; for an emulated one they are modelled, and the steps' differences are relative.
    """
    profile = original.profile
    number = sum(waiting_lines(profile, project).values()) if profile is not None else 0
    cost = _cost_of_syncs(profile, project) if profile is not None and number else None
    if cost is None:
        return ""
    times = [step.seconds for step in original.timed]
    differs = (max(times) - min(times)) / 2 / max(original.seconds, 1e-9)
    if cost.seconds > max(differs, _WORTHY) * cost.step_seconds:
        return ""
    spread = f", and steps differ by +- {100 * differs:.1f} %" if differs > _WORTHY else ""
    return (
        f"{counted(number, 'sync costs', 'syncs cost')} {format_seconds(cost.seconds)} of a "
        f"{format_seconds(cost.step_seconds)} step ({cost.source}){spread}: not worth proving a fix; --fix "
        "does"
    )


class _SyncCost(NamedTuple):
    """Cost of a step's syncs, and the time of the step on the same device."""

    seconds: float
    step_seconds: float
    source: str


def _cost_of_syncs(profile: Profile, project: Path) -> _SyncCost | None:
    """Return the cost of the syncs at the project's lines, None if it was neither modelled nor measured."""
    lines = waiting_lines(profile, project)
    own = [
        number
        for number, sync in enumerate(profile.syncs)
        if code_of(sync.row) in CODES and _absolute(line_of_sync(profile, sync), project) in lines
    ]
    if is_emulated(profile.device):
        device = device_of(profile)
        cost = price_syncs(profile, device, [own]).cost
        source = f"modelled on {device.name.upper()}"
        return _SyncCost(cost.all_saves_ms / 1e3, cost.step_ms / 1e3, source)
    seconds = [profile.syncs[number].seconds for number in own]
    known = [one for one in seconds if one is not None]
    if len(known) < len(seconds):
        return None
    return _SyncCost(sum(known), profile.step_seconds, "measured")


def _by_line(profile: Profile, project: Path) -> dict[tuple[str, int], float]:
    times: dict[tuple[str, int], float] = {}
    seconds = estimate(profile, device_of(profile)).device_seconds
    for number, time in enumerate(seconds):
        place = _absolute(line_of(profile, number), project)
        times[place] = times.get(place, 0.0) + time
    return times
