"""Whether a cure is worth it: a dense form can cost the device more than the wait cost the host.

Both forms were run, with the share of the mask that the script really has, so both are priced whole: as
the step that they are part of, on the device that was emulated.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from torchtrim.records.profile import Profile, is_emulated
from torchtrim.rules.places import line_of
from torchtrim.rules.prices import device_of
from torchtrim.sync.model.modelled import price_syncs
from torchtrim.sync.model.roofline import estimate

_DEARER = 1.002
Region = tuple[str, int, int]


def modelled_step_ms(profile: Profile) -> float | None:
    """The step's modelled time on the emulated device, in ms; None where none was emulated."""
    if not is_emulated(profile.device):
        return None
    return price_syncs(profile, device_of(profile)).step_ms


def costs_more(after: Profile, before: Profile, grown_ms: float) -> str:
    """Why cures are not worth it together: what the step takes with and without; empty where they are.

    `grown_ms` is by how much longer they keep the device. Where that is nothing to speak of, a step that
    is longer is so because the host gives out a few operators more, which later cures make up for.
    """
    now, was = modelled_step_ms(after), modelled_step_ms(before)
    if now is None or was is None or now <= _DEARER * was or grown_ms <= (_DEARER - 1) * was:
        return ""
    return f"the step is modelled at {now:.3g} ms with the cures and at {was:.3g} ms without"


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
        1e3 * (sum(_within(now, one) for one in new) - _within(was, old)) for old, new in regions
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


def _within(times: dict[tuple[str, int], float], region: Region) -> float:
    path, first, last = region
    return sum(time for (p, line), time in times.items() if p == path and first <= line <= last)
