"""The lanes of a step: when the host and the device were at which operator, module or wait."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import repeat, starmap
from typing import overload

from msgspec import Struct

from torchtrim.analysis.timeline import timeline
from torchtrim.costs.devices import DEVICES, Device
from torchtrim.costs.roofline import estimate
from torchtrim.costs.syncs import one_stream
from torchtrim.records import Profile
from torchtrim.records.finding import Source
from torchtrim.records.profile import is_emulated
from torchtrim.records.report import Waiting

_RACES = "async-"
_US = 1e6
_DEEPEST = 5
_COLUMNS = 1200


class LaneSpan(Struct, frozen=True, gc=False):
    """From `start` on for `seconds`. `index` is an operator's, or a module's; -1 for neither."""

    start: float
    seconds: float
    index: int
    name: str = ""


class Spans(Sequence[LaneSpan]):
    """Spans as columns: a million of them as objects would take ten times the memory.

    Without `indices` they are numbered; without `names` they have none.
    """

    def __init__(
        self,
        starts: array[float],
        seconds: array[float],
        indices: Sequence[int] | None = None,
        names: Sequence[str] | None = None,
    ) -> None:
        self._starts, self._seconds = starts, seconds
        self._indices = range(len(starts)) if indices is None else indices
        self._names = names

    def __len__(self) -> int:
        return len(self._starts)

    @overload
    def __getitem__(self, at: int) -> LaneSpan: ...
    @overload
    def __getitem__(self, at: slice) -> Sequence[LaneSpan]: ...
    def __getitem__(self, at: int | slice) -> LaneSpan | Sequence[LaneSpan]:
        if isinstance(at, slice):
            return [self[i] for i in range(*at.indices(len(self)))]
        name = "" if self._names is None else self._names[at]
        return LaneSpan(self._starts[at], self._seconds[at], self._indices[at], name)

    def __iter__(self) -> Iterator[LaneSpan]:
        names = repeat("", len(self)) if self._names is None else self._names
        columns = zip(self._starts, self._seconds, self._indices, names, strict=True)
        return starmap(LaneSpan, columns)


@dataclass(frozen=True, kw_only=True)
class Lanes:
    """What ran when, in seconds from the start of the step.

    `host` has a span for each operator, `device` one for each that launches work; `modules` a lane for
    each depth. `memory` are moments, bytes and the operator then.
    """

    source: Source
    device_name: str
    seconds: float
    host: Sequence[LaneSpan]
    device: Sequence[LaneSpan]
    modules: Sequence[Sequence[LaneSpan]]
    waits: Sequence[LaneSpan]
    memory: Sequence[tuple[float, int, int]]


def lanes(waiting: Waiting | None, profile: Profile) -> Lanes:
    """The step as it was recorded, or, where its waits were modelled for a GPU, as that would run it."""
    highest = _highest(profile)
    name = waiting.device if waiting else ""
    device = DEVICES.get(name) if is_emulated(profile.device) else None
    host, work, waits = _measured(profile) if device is None else _modelled(profile, device)
    ends = (span.start + span.seconds for lane in (host, work, waits) for span in lane)
    return Lanes(
        source="measured" if device is None else "modelled",
        device_name="" if device is None else device.name,
        seconds=max(ends, default=0.0),
        host=host,
        device=work,
        modules=_modules(profile, host),
        waits=waits,
        memory=[(host[i].start, size, i) for i, size in highest],
    )


_HostDeviceWaits = tuple[Sequence[LaneSpan], Sequence[LaneSpan], Sequence[LaneSpan]]


def _measured(profile: Profile) -> _HostDeviceWaits:
    host = Spans(
        array("d", (op.start for op in profile.operators)),
        array("d", (op.seconds for op in profile.operators)),
    )
    waits = [
        LaneSpan(start=w.start, seconds=w.seconds, index=-1, name="loader") for w in profile.waits
    ]
    waits += [
        LaneSpan(start=at.start, seconds=at.seconds, index=at.index, name=sync.row)
        for sync in profile.syncs
        if sync.operator >= 0 and not sync.row.startswith(_RACES)
        for at in (host[sync.operator],)
    ]
    return host, [], sorted(waits, key=lambda span: span.start)


def _modelled(profile: Profile, device: Device) -> _HostDeviceWaits:
    """As the waits were priced: one thread launches the operators, one stream runs them."""
    times = estimate(profile, device)
    program = one_stream(profile, device, times, range(len(profile.syncs)))
    moments = program.moments()
    host = Spans(_seconds(moments.host), array("d", times.host_seconds))
    launched = array("q", (i for i, busy in enumerate(times.device_seconds) if busy))
    work = Spans(
        _seconds(moments.device[i] for i in launched),
        array("d", (times.device_seconds[i] for i in launched)),
        launched,
    )
    lasted = (until - at for at, until in zip(moments.waits, moments.until, strict=True))
    waits = Spans(
        _seconds(moments.waits),
        _seconds(lasted),
        program.after,
        [profile.syncs[number].row for number in program.sites],
    )
    return host, work, waits


def _seconds(microseconds: Iterable[float]) -> array[float]:
    return array("d", (one / _US for one in microseconds))


def _modules(profile: Profile, host: Sequence[LaneSpan]) -> list[list[LaneSpan]]:
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
    profile: Profile, host: Sequence[LaneSpan], chains: Sequence[tuple[int, ...]], level: int
) -> Iterator[LaneSpan]:
    running, start, end = -1, 0.0, 0.0
    for op, span in zip(profile.operators, host, strict=True):
        chain = chains[op.module] if op.module >= 0 else ()
        module = chain[level] if level < len(chain) else -1
        if module != running:
            if running >= 0:
                yield LaneSpan(start=start, seconds=end - start, index=running)
            running, start = module, span.start
        end = span.start + span.seconds
    if running >= 0:
        yield LaneSpan(start=start, seconds=end - start, index=running)


def _highest(profile: Profile) -> list[tuple[int, int]]:
    """At most some thousand operators and the bytes then, each the highest of its stretch."""
    high = timeline(profile).high
    stretch = max(1, -(-len(high) // _COLUMNS))
    highest = (
        max(range(first, min(first + stretch, len(high))), key=high.__getitem__)
        for first in range(0, len(high), stretch)
    )
    return [(i, high[i]) for i in highest]
