"""Whether a fix is worth it: a dense form can cost the device more than the sync cost the host.

Both forms were run, with the share of the mask that the script really has, so both are priced whole: as
the step that they are part of, on the device that was emulated.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from torchtrim.analysis.places import line_of
from torchtrim.analysis.prices import device_of
from torchtrim.costs.roofline import estimate
from torchtrim.costs.syncs import price_syncs
from torchtrim.records.profile import Profile, is_emulated

_DEARER = 1.002
Region = tuple[str, int, int]


class Modelled(NamedTuple):
    """A step on the emulated device, in ms: how long it takes, and how long the device is busy in it."""

    step_ms: float
    busy_ms: float


def modelled(profile: Profile) -> Modelled | None:
    """The step as it is modelled; None where no device was emulated."""
    if not is_emulated(profile.device):
        return None
    found = price_syncs(profile, device_of(profile))
    return Modelled(found.step_ms, found.device_busy_ms)


def costs_more(after: Profile, before: Profile) -> str:
    """Why fixes are not worth it together; empty where they are.

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
