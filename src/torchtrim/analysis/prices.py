"""Prices the syncs of an emulated step on the device that it emulates."""

from __future__ import annotations

from collections.abc import Iterable

from msgspec.structs import replace

from torchtrim.analysis.syncs import CODES, sync_numbers
from torchtrim.costs.devices import DeviceSpec, device_named
from torchtrim.costs.syncs import price_syncs
from torchtrim.records.files import without_collection
from torchtrim.records.finding import Finding
from torchtrim.records.profile import Profile, is_emulated
from torchtrim.records.report import WaitCost
from torchtrim.step.from_profile import on_device, step_of
from torchtrim.step.step import Step

LOADER = "TT301"


def time_share(profile: Profile, finding: Finding) -> float:
    """Return the share of the step's time; a loader's is of the step timed with it."""
    step = profile.step_seconds
    if finding.code == LOADER and profile.loader is not None:
        step = profile.loader.step_seconds
    return (finding.price_ms or 0.0) / 1e3 / max(step, 1e-9)


def memory_share(profile: Profile, finding: Finding) -> float:
    """Return the share of the peak."""
    return (finding.price_bytes or 0) / max(profile.peak_bytes, 1)


_DEFAULT = "a100"
_NOTHING = 0.003  # As in _LITTLE. Arbitrary; a modelled step is less exact.
_MOVES = "; removing it alone gains nothing, since the next sync waits instead"
_LITTLE = "; all waits together are worth less than 0.3 % of the step"


def priced(
    profile: Profile, findings: Iterable[Finding]
) -> tuple[tuple[Finding, ...], WaitCost | None]:
    """Price syncs by the step's gain without each alone. Return all findings, most expensive first, and the
    gains of sets.

    Only emulated steps are priced; real ones were measured.
    """
    findings = tuple(findings)
    waiting = [finding for finding in findings if finding.code in CODES]
    if not is_emulated(profile.device) or not waiting:
        return findings, None
    device = device_of(profile)
    with without_collection():
        cost, waits = price_syncs(profile, device, sync_numbers(profile, waiting))
    prices = {id(f): wait.saves_alone_ms for f, wait in zip(waiting, waits, strict=True)}
    ordered = sorted(findings, key=lambda finding: _order(profile, cost, finding, prices))
    places = {id(finding): number for number, finding in enumerate(ordered)}
    sets = tuple(
        replace(one, findings=tuple(sorted(places[id(waiting[i])] for i in one.findings)))
        for one in cost.sets
    )
    least = _NOTHING * cost.step_ms
    small = _LITTLE if cost.all_saves_ms < least else _MOVES
    every = tuple(_with_price(one, prices.get(id(one)), least, small) for one in ordered)
    return every, replace(cost, sets=sets)


def _with_price(finding: Finding, price: float | None, least: float, small: str) -> Finding:
    """Add the price. If it is below `least`, a few thousandths of the step, append the reason `small`."""
    if price is None:
        return finding
    message = finding.message + (small if price < least else "")
    return replace(finding, price_ms=price, message=message, source="modelled")


def _order(
    profile: Profile, model: WaitCost, finding: Finding, prices: dict[int, float | None]
) -> tuple[float, int, str, str, int]:
    """Sort key: the share of the peak or of the step's time. A sync's share is of the modelled step.

    A loader runs on the host, which is real: its time is added to the modelled step.
    """
    if id(finding) in prices:
        time = (prices[id(finding)] or 0.0) / max(model.step_ms, 1e-9)
    elif finding.code == LOADER:
        waited = finding.price_ms or 0.0
        time = waited / max(waited + model.step_ms, 1e-9)
    else:
        time = time_share(profile, finding)
    most = -max(time, memory_share(profile, finding))
    return most, -finding.count_per_step, finding.code, finding.path, finding.line


def device_of(profile: Profile) -> DeviceSpec:
    """Return the device that a profile emulates."""
    return device_named(profile.device.partition(" ")[2] or _DEFAULT)


def timed_step(profile: Profile) -> tuple[Step, str]:
    """Return the step with the times that prices are in, and where they hold: `" on A100, modelled"`."""
    step = step_of(profile)
    if is_emulated(profile.device):
        device = device_of(profile)
        return on_device(step, device), f" on {device.name.upper()}, modelled"
    return step, " on this CPU" if profile.device.startswith("cpu") else ""
