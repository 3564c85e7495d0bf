"""The lanes of a step: when the host and the device ran each operator, module, wait and planned copy."""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby, repeat, starmap
from typing import overload

from msgspec import Struct

from torchtrim.analysis.prices import device_of
from torchtrim.analysis.timeline import timeline
from torchtrim.core.units import format_bytes, format_seconds
from torchtrim.costs.devices import DEVICES, DeviceSpec
from torchtrim.costs.roofline import estimate
from torchtrim.costs.syncs import one_stream
from torchtrim.errors import ApplyFailed
from torchtrim.records.finding import Source
from torchtrim.records.plan import Technique
from torchtrim.records.profile import Profile, is_emulated
from torchtrim.records.report import WaitCost
from torchtrim.step.from_profile import on_device, step_of
from torchtrim.step.links import Traffic, traffic
from torchtrim.step.step import DETACH, Step
from torchtrim.techniques.offload_activations.places import placed
from torchtrim.techniques.offload_activations.windows import edit_of

_RACES = "async-"
_US = 1e6  # Microseconds per second.
_DEEPEST = 5  # Arbitrary; deeper lanes of modules are too fine to read.
_COLUMNS = 1200  # Arbitrary; about one value of memory for each pixel of a screen.


class LaneSpan(Struct, frozen=True, gc=False):
    """A span of `seconds` from `start`. `index` is an operator's or a module's, or -1."""

    start: float
    seconds: float
    index: int
    name: str = ""


class Spans(Sequence[LaneSpan]):
    """Spans stored as columns: a million of them as objects would take ten times the memory.

    Without `indices` the spans are numbered; without `names` their names are empty.
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
    """The lanes of a step, in seconds from its start.

    `host` has a span for each operator, `device` one for each that launches work, `modules` a lane for each
    depth. `memory` has tuples of time, bytes and operator.
    """

    source: Source
    device_name: str
    seconds: float
    host: Sequence[LaneSpan]
    device: Sequence[LaneSpan]
    modules: Sequence[Sequence[LaneSpan]]
    waits: Sequence[LaneSpan]
    memory: Sequence[tuple[float, int, int]]


def lanes(waiting: WaitCost | None, profile: Profile) -> Lanes:
    """Return the step as recorded or, if its waits were modelled for a GPU, as that GPU would run it."""
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
    waits = [LaneSpan(w.start, w.seconds, -1, "loader") for w in profile.waits]
    waits += [
        LaneSpan(host[sync.operator].start, host[sync.operator].seconds, sync.operator, sync.row)
        for sync in profile.syncs
        if sync.operator >= 0 and not sync.row.startswith(_RACES)
    ]
    return host, [], sorted(waits, key=lambda span: span.start)


def _modelled(profile: Profile, device: DeviceSpec) -> _HostDeviceWaits:
    """Model the step as prices of waits do: one thread launches the operators, one stream runs them."""
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
    """Return a lane for each depth: the runs of consecutive operators inside one module of that depth."""
    chains: list[tuple[int, ...]] = []
    for i, module in enumerate(profile.modules):
        above = chains[module.parent] if module.parent >= 0 else ()
        chains.append((*above[:_DEEPEST], i))
    depth = min(max(map(len, chains), default=0), _DEEPEST)
    own = [chains[op.module] if op.module >= 0 else () for op in profile.operators]
    return [list(_runs(host, own, level)) for level in range(depth)]


def _runs(
    host: Sequence[LaneSpan], chains: Sequence[tuple[int, ...]], level: int
) -> Iterator[LaneSpan]:
    modules = (chain[level] if level < len(chain) else -1 for chain in chains)
    for module, run in groupby(zip(modules, host, strict=True), key=lambda pair: pair[0]):
        if module >= 0:
            spans = (span for _, span in run)
            first = next(spans)
            last = (deque(spans, maxlen=1) or [first])[0]  # no list: a run may have a million spans
            end = last.start + last.seconds
            yield LaneSpan(start=first.start, seconds=end - first.start, index=module)


def _highest(profile: Profile) -> list[tuple[int, int]]:
    """Return about a thousand operators with their live bytes, each the highest of its interval."""
    high = timeline(profile).high
    stretch = max(1, -(-len(high) // _COLUMNS))
    highest = (
        max(range(first, min(first + stretch, len(high))), key=high.__getitem__)
        for first in range(0, len(high), stretch)
    )
    return [(i, high[i]) for i in highest]


@dataclass(frozen=True, kw_only=True)
class CopyLanes:
    """Lanes of the planned step, in seconds from its start; spans have the operator's index.

    A copy in `out` or `home` has the index of the operator that produced its tensor. `awaited`: pauses of
    compute for a copy. `bytes` counts the copies in one direction.
    """

    device_name: str
    seconds: float
    compute: Sequence[LaneSpan]
    out: Sequence[LaneSpan]
    home: Sequence[LaneSpan]
    awaited: Sequence[LaneSpan]
    bytes: int

    @property
    def caption(self) -> str:
        """Return a sentence on the copies and the share that compute hides."""
        copied = sum(span.seconds for span in (*self.out, *self.home))
        waited = sum(span.seconds for span in self.awaited)
        hidden = f"{100 * (1 - min(waited / copied, 1.0)):.0f} % of that" if waited else "all of it"
        waits = f" and waits {format_seconds(waited)}" if waited else ""
        return (
            f"Modelled for an {self.device_name.upper()}: {len(self.out)} activations of "
            f"{format_bytes(self.bytes)} go to the host and come back in {format_seconds(copied)}; "
            f"compute hides {hidden}{waits}."
        )


def copies_of(profile: Profile, techniques: Iterable[Technique]) -> CopyLanes | None:
    """Return the lanes of the planned step, or None if the plan copies nothing in the profile's step."""
    where = [
        place for one in techniques if one.name == "offload_activations" for place in one.where
    ]
    if not where or not profile.operators or not is_emulated(profile.device):
        return None
    step = on_device(step_of(profile), device_of(profile))
    edits = []
    for place in where:
        try:
            saved, room = placed(place)
        except ApplyFailed:
            continue
        edits.append(edit_of(step, saved, in_file=room.in_file))
    found = traffic(step, [edit for edit in edits if edit is not None])
    return _lanes(step, found, device_of(profile).name) if found.copies else None


def _lanes(step: Step, found: Traffic, device: str) -> CopyLanes:
    tasks = [task for task, _ in found.delays]
    delays = [0.0, *(delay for _, delay in found.delays)]
    compute = [
        LaneSpan(start + delays[bisect_right(tasks, number)], task.seconds, number)
        for number, (start, task) in enumerate(zip(step.clock, step.tasks, strict=False))
        if task.seconds and not task.name.startswith(DETACH)
    ]
    ways: dict[str, list[LaneSpan]] = {"out": [], "home": []}
    for copy in found.copies:
        at = found.trips[copy.trip].leaves - 1
        span = LaneSpan(start=copy.start, seconds=copy.end - copy.start, index=at, name=copy.way)
        ways[copy.way].append(span)
    awaited = [
        LaneSpan(start=copy.end - copy.stall, seconds=copy.stall, index=-1, name=copy.way)
        for copy in found.copies
        if copy.stall
    ]
    return CopyLanes(
        device_name=device,
        seconds=step.clock[-1] + delays[-1],
        compute=compute,
        out=ways["out"],
        home=ways["home"],
        awaited=sorted(awaited, key=lambda span: span.start),
        bytes=sum(trip.bytes for trip in found.trips),
    )
