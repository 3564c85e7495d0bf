"""Where a step's time and memory go: time by part and by operator, memory by module."""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from torchtrim.analysis.timeline import alive, peak_operator
from torchtrim.core.units import format_seconds
from torchtrim.records import Profile, Report
from torchtrim.records.finding import Source
from torchtrim.records.operator_names import base_name, module_paths, owner
from torchtrim.records.profile import is_emulated
from torchtrim.records.report import Waiting
from torchtrim.report import facts
from torchtrim.report.lanes import Lanes
from torchtrim.report.safe import clean, keep_right

_NAMES = {
    "device": "device busy",
    "loader": "data loader",
    "forward": "forward",
    "backward": "backward",
    "recompute": "forward again",
    "optimizer": "optimizer",
    "other": "other operators",
    "communication": "communication",
    "waiting": "waiting",
    "host": "host",
}
_SLOWED = 1.05
_COMMUNICATION = ("c10d::", "_c10d_functional::", "c10d_functional::")
_CPU = "On a CPU nothing synchronizes. Host is Python between operators."
_STANDS_IN = (
    "The CPU did the GPU's work: these are not a GPU's times. Host is Python between operators."
)
_GPU = (
    "The host's own time: operators are given out, and the device works meanwhile. What it does then "
    "`torchtrim trace` tells, from a trace of torch.profiler."
)
_MOST_CHARACTERS = 60
_DEEPEST = 6
_MOST_CHILDREN = 12
_SMALL = 0.005
_OUTSIDE = "outside modules"


@dataclass(frozen=True, kw_only=True)
class TimePart:
    """A part of the step. `share` is in percent."""

    kind: str
    name: str
    seconds: float
    share: float


@dataclass(frozen=True, kw_only=True)
class TimeSplit:
    """A step's time in parts, the whole first. `said` tells how to read it."""

    title: str
    source: Source
    seconds: float
    parts: Sequence[TimePart]
    said: str


def splits(report: Report, profile: Profile | None) -> list[TimeSplit]:
    """The step's time as it is known: modelled for a GPU that is emulated, and as measured."""
    found = []
    if report.waiting is not None and report.waiting.step_ms:
        found.append(_modelled(report.waiting))
    if profile is not None and profile.operators:
        found.append(_measured(report, profile))
    return [one for one in found if one.seconds > 0]


def _modelled(waiting: Waiting) -> TimeSplit:
    whole = max(waiting.step_ms, waiting.device_busy_ms)
    idle = whole - waiting.device_busy_ms
    waits = min(waiting.all_saves_ms, idle)
    seconds = {
        "device": waiting.device_busy_ms / 1e3,
        "waiting": waits / 1e3,
        "host": (idle - waits) / 1e3,
    }
    said = (
        "Lower bounds, from operators' work and bytes. Waiting is what the step would gain without "
        "waits; host is when the device has nothing to do because the host is slower, a loader in the "
        "same process too."
    )
    return _split(f"{waiting.device.upper()}, modelled", waiting.source, seconds, said)


def _measured(report: Report, profile: Profile) -> TimeSplit:
    seconds = _by_kind(profile)
    known = sum(seconds.values())
    timed = report.original.step_seconds if report.original else 0.0
    whole = max(timed or profile.step_seconds, known)
    seconds["host"] = whole - known
    whole_step = format_seconds(profile.step_seconds)
    recorded = f" Operators as recorded; the step took {whole_step} with the recorder."
    title, said = _about(profile.device)
    if timed and known > _SLOWED * timed:
        title += " with the recorder"
    return _split(title, "measured", seconds, said + (recorded if timed else ""))


def _about(device: str) -> tuple[str, str]:
    if is_emulated(device):
        return "This CPU, measured", _STANDS_IN
    return ("The CPU, measured", _CPU) if device == "cpu" else ("The host, measured", _GPU)


def _by_kind(profile: Profile) -> dict[str, float]:
    waits = {sync.operator for sync in profile.syncs if sync.seconds is not None}
    seconds: dict[str, float] = defaultdict(float)
    seconds["loader"] = sum(wait.seconds for wait in profile.waits)
    loads = sorted((wait.start, wait.start + wait.seconds) for wait in profile.waits)
    for number, op in enumerate(profile.operators):
        if op.phase == "loader" and _inside(loads, op.start):
            continue
        if number in waits:
            kind = "waiting"
        elif op.name.startswith(_COMMUNICATION):
            kind = "communication"
        else:
            kind = op.phase
        seconds[kind] += op.seconds
    return seconds


def _inside(loads: Sequence[tuple[float, float]], start: float) -> bool:
    before = bisect_right(loads, (start, float("inf"))) - 1
    return before >= 0 and start <= loads[before][1]


def _split(title: str, source: Source, seconds: Mapping[str, float], said: str) -> TimeSplit:
    whole = sum(seconds.values())
    return TimeSplit(
        title=title, source=source, seconds=whole, parts=list(_parts(seconds, whole)), said=said
    )


def _parts(seconds: Mapping[str, float], whole: float) -> Iterator[TimePart]:
    for kind, name in _NAMES.items():
        if seconds.get(kind, 0.0) > 0:
            share = 100 * seconds[kind] / whole
            yield TimePart(kind=kind, name=name, seconds=seconds[kind], share=share)


@dataclass(frozen=True, kw_only=True)
class OperatorRow:
    """Operators of one name, phase and line. `made_bytes`: of the tensors that they made."""

    name: str
    phase: str
    place: str
    count: int
    seconds: float
    share: float
    made_bytes: int
    waits: int


@dataclass(frozen=True, kw_only=True)
class OperatorTable:
    """The longest rows; how many rows and which share of the time were left out."""

    rows: Sequence[OperatorRow]
    dropped: int
    dropped_share: float
    heading: str


@dataclass(slots=True)
class _Sum:
    count: int = 0
    seconds: float = 0.0
    made: int = 0
    waits: int = 0


_Key = tuple[str, str, int]


def operator_table(profile: Profile, lanes: Lanes, most: int, *, source: bool) -> OperatorTable:
    """At most `most` rows. Without `source` no line is named, and lines are not distinguished."""
    sums, key_of = _sums(profile, source)
    on_device = lanes.source == "modelled"
    for span in lanes.device if on_device else lanes.host:
        sums[key_of[span.index]].seconds += span.seconds
    ordered = sorted(sums.items(), key=lambda item: (-item[1].seconds, -item[1].count, item[0]))
    whole = sum(one.seconds for one in sums.values()) or 1.0
    rows = [_row(profile, key, one, whole) for key, one in ordered[:most]]
    return OperatorTable(
        rows=rows,
        dropped=max(len(ordered) - most, 0),
        dropped_share=100 * sum(one.seconds for _, one in ordered[most:]) / whole,
        heading="device, modelled" if on_device else "time",
    )


def _sums(profile: Profile, source: bool) -> tuple[dict[_Key, _Sum], list[_Key]]:
    sums: dict[_Key, _Sum] = {}
    keys: list[_Key] = []
    for op in profile.operators:
        place = op.caller if op.caller >= 0 else op.place
        key = (op.name, op.phase, place if source else -1)
        keys.append(key)
        sums.setdefault(key, _Sum()).count += 1
    for storage in profile.storages:
        if 0 <= storage.birth < len(keys):
            sums[keys[storage.birth]].made += storage.counted
    for sync in profile.syncs:
        if sync.operator >= 0:
            sums[keys[sync.operator]].waits += 1
    return sums, keys


def _row(profile: Profile, key: _Key, one: _Sum, whole: float) -> OperatorRow:
    name, phase, number = key
    place = profile.places[number] if number >= 0 else None
    where = facts.place(place.path, place.line, facts.home(profile)) if place else ""
    return OperatorRow(
        name=keep_right(clean(base_name(name).removeprefix("aten::")), _MOST_CHARACTERS),
        phase=phase,
        place=keep_right(clean(where), _MOST_CHARACTERS),
        count=one.count,
        seconds=one.seconds,
        share=100 * one.seconds / whole,
        made_bytes=one.made,
        waits=one.waits,
    )


@dataclass(frozen=True, kw_only=True)
class ModuleNode:
    """A module: its name in its parent, its bytes, its share in percent, and the modules in it."""

    name: str
    bytes: int
    share: float
    children: Sequence[ModuleNode]


@dataclass(frozen=True)
class _Held:
    """Bytes by path, those of modules inside included, and the paths inside each."""

    total: dict[str, int]
    inside: dict[str, list[str]]


def tree(profile: Profile) -> Sequence[ModuleNode]:
    """The roots, largest first. Modules with less than a two-hundredth are summed as `others`."""
    held = _held(profile)
    whole = sum(held.total[root] for root in held.inside[""])
    return list(_nodes(held, "", whole, 0)) if whole else []


def _held(profile: Profile) -> _Held:
    modules = module_paths(profile)
    total: dict[str, int] = defaultdict(int)
    inside: dict[str, list[str]] = defaultdict(list)
    for index in alive(profile, peak_operator(profile)):
        size = profile.storages[index].counted
        path = owner(profile, index, modules) or _OUTSIDE
        parts = path.split(".")[:_DEEPEST] if path in modules else [path]
        above = ""
        for depth in range(len(parts)):
            here = ".".join(parts[: depth + 1])
            if here not in total:
                inside[above].append(here)
            total[here] += size
            above = here
    return _Held(total, inside)


def _nodes(held: _Held, path: str, whole: int, depth: int) -> Iterator[ModuleNode]:
    ordered = sorted(held.inside.get(path, ()), key=lambda one: (-held.total[one], one))
    large = [one for one in ordered if held.total[one] >= _SMALL * whole][:_MOST_CHILDREN]
    for one in large:
        name = one.removeprefix(f"{path}.") if path else one
        children = list(_nodes(held, one, whole, depth + 1))
        yield _node(name, held.total[one], whole, children)
    rest = ordered[len(large) :]
    if rest:
        size = sum(held.total[one] for one in rest)
        yield _node(f"{len(rest)} other{'s' if len(rest) > 1 else ''}", size, whole, ())


def _node(name: str, size: int, whole: int, children: Sequence[ModuleNode]) -> ModuleNode:
    shown = keep_right(clean(name), 40)
    return ModuleNode(name=shown, bytes=size, share=100 * size / whole, children=children)


def count(nodes: Sequence[ModuleNode]) -> int:
    """How many there are, those inside included."""
    return sum(1 + count(node.children) for node in nodes)
