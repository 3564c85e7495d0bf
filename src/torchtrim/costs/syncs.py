"""Models the cost of an emulated step's syncs on a named device, by replaying roofline times."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import NamedTuple

from msgspec import Struct

from torchtrim.costs.devices import DeviceSpec
from torchtrim.costs.replay import NO_SITE, OneStream, bound, price, replay
from torchtrim.costs.roofline import RooflineEstimate, estimate
from torchtrim.records.profile import Profile
from torchtrim.records.report import WaitCost, WaitSet

_RACES = "async-"
_US = 1e6  # Microseconds in a second.
_BACK_US = 5.0  # Usual in public traces, as in traces/build.py.
_GAP_US = 1.5  # Usual in public traces, as in traces/build.py.


class ModelledWait(Struct, frozen=True, kw_only=True):
    """A site that synchronizes, with its syncs by number in the profile. Times are in milliseconds."""

    syncs: tuple[int, ...]
    wait_ms: float
    saves_alone_ms: float | None


class PricedSyncs(NamedTuple):
    """The modelled cost of a step's syncs. Its sets hold indices of `waits`, in place of findings."""

    cost: WaitCost
    waits: tuple[ModelledWait, ...]


def price_syncs(
    profile: Profile, device: DeviceSpec, sites: Sequence[Sequence[int]] | None = None
) -> PricedSyncs:
    """Price every sync of the profile on the device, alone and in sets.

    `sites` groups the syncs by number; by default those of one line and row. One thread launches the
    operators in order on one stream. Copies that race are not syncs.
    """
    times = estimate(profile, device)
    groups = _groups(profile) if sites is None else sites
    program = one_stream(profile, device, times, _sites(profile, groups))
    base = replay(program)
    order = sorted(range(len(groups)), key=lambda i: -base.waited.get(i, 0.0))
    prices = price(program, order)
    waits = tuple(
        ModelledWait(
            syncs=tuple(numbers),
            wait_ms=base.waited.get(i, 0.0) / 1e3,
            saves_alone_ms=prices.alone[i] / 1e3 if i in prices.alone else None,
        )
        for i, numbers in enumerate(groups)
    )
    cost = WaitCost(
        device=device.name,
        source="modelled",
        step_ms=base.span / 1e3,
        device_busy_ms=sum(times.device_seconds) * 1e3,
        bound=bound(program, gained=prices.together, span=base.span, loading=0.0),
        all_saves_ms=prices.together / 1e3,
        sets=tuple(
            WaitSet(findings=tuple(sorted(chosen)), saves_ms=gain / 1e3)
            for chosen, gain in prices.sets
        ),
    )
    return PricedSyncs(cost, waits)


def _groups(profile: Profile) -> list[list[int]]:
    groups: dict[tuple[int, str], list[int]] = {}
    for number, sync in enumerate(profile.syncs):
        if not sync.row.startswith(_RACES):
            place = sync.caller if sync.caller >= 0 else sync.place
            groups.setdefault((place, sync.row), []).append(number)
    return list(groups.values())


def one_stream(
    profile: Profile, device: DeviceSpec, times: RooflineEstimate, site_of: Sequence[int]
) -> OneStream:
    """Model the step as one thread that launches on one stream. `site_of`: the site of each sync."""
    after, numbers = _after(profile)
    return OneStream(
        host=array("d", (seconds * _US for seconds in times.host_seconds)),
        device=array("d", (seconds * _US for seconds in times.device_seconds)),
        launch=device.launch * _US,
        gap=_GAP_US,
        back=_BACK_US,
        after=after,
        sites=array("q", (site_of[number] for number in numbers)),
    )


def _sites(profile: Profile, groups: Sequence[Sequence[int]]) -> list[int]:
    sites = {number: site for site, numbers in enumerate(groups) for number in numbers}
    return [sites.get(number, NO_SITE) for number in range(len(profile.syncs))]


def _after(profile: Profile) -> tuple[array[int], Sequence[int]]:
    """Return the operators after which the host waits (outside one: the last before), and their syncs."""
    first: dict[str, int] = {}
    for number, op in enumerate(profile.operators):
        first.setdefault(op.phase, number)
    after, numbers, before = array("q"), array("q"), -1
    for number, sync in enumerate(profile.syncs if profile.operators else ()):
        if sync.row.startswith(_RACES):
            continue
        before = sync.operator if sync.operator >= 0 else max(before, first.get(sync.phase, 0))
        after.append(before)
        numbers.append(number)
    order = sorted(range(len(after)), key=after.__getitem__)
    return array("q", (after[i] for i in order)), array("q", (numbers[i] for i in order))
