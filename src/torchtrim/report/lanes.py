"""The lanes of a step: when the host and the device were at which operator, module or wait."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torchtrim.memory.timeline import timeline
from torchtrim.records import Profile
from torchtrim.records.finding import Source
from torchtrim.records.profile import Sync, is_emulated
from torchtrim.records.report import Waiting
from torchtrim.sync.model.devices import DEVICES, Device
from torchtrim.sync.model.roofline import estimate

_RACES = "async-"
_BACK = 5e-6
_GAP = 1.5e-6
_DEEPEST = 5
_COLUMNS = 1200


@dataclass(frozen=True, kw_only=True, slots=True)
class Span:
    """From `start` on for `seconds`. `index` is an operator's, or a module's; -1 for neither."""

    start: float
    seconds: float
    index: int
    name: str = ""


@dataclass(frozen=True, kw_only=True)
class Lanes:
    """What ran when, in seconds from the start of the step.

    `host` has a span for each operator, `device` one for each that launches work; `modules` a lane for
    each depth. `memory` are moments, bytes and the operator then.
    """

    source: Source
    device_name: str
    seconds: float
    host: Sequence[Span]
    device: Sequence[Span]
    modules: Sequence[Sequence[Span]]
    waits: Sequence[Span]
    memory: Sequence[tuple[float, int, int]]


def lanes(waiting: Waiting | None, profile: Profile) -> Lanes:
    """The step as it was recorded, or, where its waits were modelled for a GPU, as that would run it."""
    name = waiting.device if waiting else ""
    if is_emulated(profile.device) and name in DEVICES:
        return _modelled(profile, DEVICES[name])
    return _measured(profile)


def _measured(profile: Profile) -> Lanes:
    host = [
        Span(start=op.start, seconds=op.seconds, index=i) for i, op in enumerate(profile.operators)
    ]
    waits = [Span(start=w.start, seconds=w.seconds, index=-1, name="loader") for w in profile.waits]
    waits += [
        Span(start=at.start, seconds=at.seconds, index=at.index, name=sync.row)
        for sync in profile.syncs
        if sync.operator >= 0 and not sync.row.startswith(_RACES)
        for at in (host[sync.operator],)
    ]
    return _lanes(profile, "measured", "", host, [], sorted(waits, key=lambda span: span.start))


def _modelled(profile: Profile, device: Device) -> Lanes:
    """The model of `sync.modelled`, which tells how long, with when."""
    times = estimate(profile, device)
    waiting = _after(profile)
    host: list[Span] = []
    work: list[Span] = []
    waits: list[Span] = []
    now = free = 0.0
    for i, (busy, cost) in enumerate(zip(times.device_seconds, times.host_seconds, strict=True)):
        host.append(Span(start=now, seconds=cost, index=i))
        if busy:
            start = max(now + device.launch, free + _GAP if work else 0.0)
            work.append(Span(start=start, seconds=busy, index=i))
            free = start + busy
        now += cost
        for sync in waiting.get(i, ()):
            until = max(now, free + _BACK) if work else now
            waits.append(Span(start=now, seconds=until - now, index=i, name=sync.row))
            now = until
    return _lanes(profile, "modelled", device.name, host, work, waits)


def _after(profile: Profile) -> dict[int, list[Sync]]:
    found: dict[int, list[Sync]] = {}
    first: dict[str, int] = {}
    for i, op in enumerate(profile.operators):
        first.setdefault(op.phase, i)
    before = -1
    for sync in profile.syncs:
        if not sync.row.startswith(_RACES):
            before = sync.operator if sync.operator >= 0 else max(before, first.get(sync.phase, 0))
            found.setdefault(before, []).append(sync)
    return found


def _lanes(
    profile: Profile,
    source: Source,
    device_name: str,
    host: Sequence[Span],
    device: Sequence[Span],
    waits: Sequence[Span],
) -> Lanes:
    ends = (span.start + span.seconds for lane in (host, device, waits) for span in lane)
    return Lanes(
        source=source,
        device_name=device_name,
        seconds=max(ends, default=0.0),
        host=host,
        device=device,
        modules=_modules(profile, host),
        waits=waits,
        memory=_memory(profile, host),
    )


def _modules(profile: Profile, host: Sequence[Span]) -> list[list[Span]]:
    """For each depth the runs of operators of one module, of those that it is in as well."""
    chains = _chains(profile)
    depth = min(max(map(len, chains), default=0), _DEEPEST)
    return [list(_runs(profile, host, chains, level)) for level in range(depth)]


def _chains(profile: Profile) -> list[tuple[int, ...]]:
    chains: list[tuple[int, ...]] = []
    for i, module in enumerate(profile.modules):
        above = chains[module.parent] if module.parent >= 0 else ()
        chains.append((*above[:_DEEPEST], i))
    return chains


def _runs(
    profile: Profile, host: Sequence[Span], chains: Sequence[tuple[int, ...]], level: int
) -> Iterator[Span]:
    running, start, end = -1, 0.0, 0.0
    for op, span in zip(profile.operators, host, strict=True):
        chain = chains[op.module] if op.module >= 0 else ()
        module = chain[level] if level < len(chain) else -1
        if module != running:
            if running >= 0:
                yield Span(start=start, seconds=end - start, index=running)
            running, start = module, span.start
        end = span.start + span.seconds
    if running >= 0:
        yield Span(start=start, seconds=end - start, index=running)


def _memory(profile: Profile, host: Sequence[Span]) -> list[tuple[float, int, int]]:
    """At most a thousand moments, each the highest of its stretch."""
    high = timeline(profile).high
    stretch = max(1, -(-len(high) // _COLUMNS))
    highest = (
        max(range(first, min(first + stretch, len(high))), key=high.__getitem__)
        for first in range(0, len(high), stretch)
    )
    return [(host[i].start, high[i], i) for i in highest]
