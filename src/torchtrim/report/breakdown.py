"""Breakdowns of a step: its time by part and by operator, its memory by module."""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from torchtrim.analysis.timeline import alive, peak_operator
from torchtrim.core.units import counted, format_seconds
from torchtrim.records import Profile, Report
from torchtrim.records.finding import Source
from torchtrim.records.operator_names import base_name, module_paths, owner
from torchtrim.records.profile import is_emulated
from torchtrim.records.report import WaitCost
from torchtrim.report import facts
from torchtrim.report.lanes import Lanes
from torchtrim.report.safe import clean, keep_right

_NAMES = {
    "device": "device busy",
    "loader": "data loader",
    "forward": "forward",
    "backward": "backward",
    "recompute": "recomputed forward",
    "optimizer": "optimizer",
    "other": "other operators",
    "communication": "communication",
    "waiting": "waiting",
    "host": "host",
}
_SLOWED = 1.05  # Arbitrary; more than the times of equal steps usually differ.
_COMMUNICATION = ("c10d::", "_c10d_functional::", "c10d_functional::")
_CPU = "A CPU has no host-device syncs. Host is the Python code between operators."
_EMULATED = "The CPU emulated the GPU, so these are not GPU times. Host is the Python code between operators."
_GPU = (
    "Host time only: the host launches operators while the device works. `torchtrim trace` shows the "
    "device's work, from a trace of torch.profiler."
)
_MOST_CHARACTERS = 60  # Arbitrary; names fit a cell of the page's table.
_DEEPEST = 6  # Arbitrary; deeper levels are too narrow to compare.
_MOST_CHILDREN = 12  # Arbitrary; the rest of a level is summed as "others".
_SMALL = 0.005  # Half a percent; smaller bars are invisible.
_OUTSIDE = "outside modules"


@dataclass(frozen=True, kw_only=True)
class TimePart:
    """A part of the step's time. `share` is in percent."""

    kind: str
    name: str
    seconds: float
    share: float


@dataclass(frozen=True, kw_only=True)
class TimeSplit:
    """A step's time, split into parts. `caption` explains how to read it."""

    title: str
    source: Source
    seconds: float
    parts: Sequence[TimePart]
    caption: str


def splits(report: Report, profile: Profile | None) -> list[TimeSplit]:
    """Return the known splits of the step's time: modelled for an emulated GPU, and measured."""
    found = []
    if report.waiting is not None and report.waiting.step_ms:
        found.append(_modelled(report.waiting))
    if profile is not None and profile.operators:
        found.append(_measured(report, profile))
    return [one for one in found if one.seconds > 0]


def _modelled(waiting: WaitCost) -> TimeSplit:
    whole = max(waiting.step_ms, waiting.device_busy_ms)
    idle = whole - waiting.device_busy_ms
    waits = min(waiting.all_saves_ms, idle)
    seconds = {
        "device": waiting.device_busy_ms / 1e3,
        "waiting": waits / 1e3,
        "host": (idle - waits) / 1e3,
    }
    caption = (
        "Lower bounds, from the operators' work and bytes. Waiting is the time the step would save "
        "without waits; host is the time the device is idle because the host is slower, including a "
        "data loader in the same process."
    )
    return _split(f"{waiting.device.upper()}, modelled", waiting.source, seconds, caption)


def _measured(report: Report, profile: Profile) -> TimeSplit:
    seconds = _by_kind(profile)
    known = sum(seconds.values())
    timed = report.original.step_seconds if report.original else 0.0
    whole = max(timed or profile.step_seconds, known)
    seconds["host"] = whole - known
    whole_step = format_seconds(profile.step_seconds)
    recorded = f" Operator times are as recorded; the step took {whole_step} with the recorder."
    title, caption = "The host, measured", _GPU
    if is_emulated(profile.device):
        title, caption = "This CPU, measured", _EMULATED
    elif profile.device == "cpu":
        title, caption = "The CPU, measured", _CPU
    if timed and known > _SLOWED * timed:
        title += " with the recorder"
    return _split(title, "measured", seconds, caption + (recorded if timed else ""))


def _by_kind(profile: Profile) -> dict[str, float]:
    waits = {sync.operator for sync in profile.syncs if sync.seconds is not None}
    seconds: dict[str, float] = defaultdict(float)
    seconds["loader"] = sum(wait.seconds for wait in profile.waits)
    loads = sorted((wait.start, wait.start + wait.seconds) for wait in profile.waits)
    for number, op in enumerate(profile.operators):
        last = bisect_right(loads, (op.start, float("inf"))) - 1
        if op.phase == "loader" and last >= 0 and op.start <= loads[last][1]:
            continue  # The wait for the loader has its time already.
        kind = "communication" if op.name.startswith(_COMMUNICATION) else op.phase
        seconds["waiting" if number in waits else kind] += op.seconds
    return seconds


def _split(title: str, source: Source, seconds: Mapping[str, float], caption: str) -> TimeSplit:
    whole = sum(seconds.values())
    parts = [
        TimePart(kind=kind, name=name, seconds=seconds[kind], share=100 * seconds[kind] / whole)
        for kind, name in _NAMES.items()
        if seconds.get(kind, 0.0) > 0
    ]
    return TimeSplit(title=title, source=source, seconds=whole, parts=parts, caption=caption)


@dataclass(frozen=True, kw_only=True)
class OperatorRow:
    """Operators with the same name, phase and line. `made_bytes`: bytes of the tensors they allocated."""

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
    """The rows with the most time, and the number of omitted rows with their share of the time."""

    rows: Sequence[OperatorRow]
    dropped: int
    dropped_share: float
    heading: str


@dataclass(slots=True)
class _OperatorSum:
    count: int = 0
    seconds: float = 0.0
    made: int = 0
    waits: int = 0


_Key = tuple[str, str, int]


def operator_table(profile: Profile, lanes: Lanes, most: int, *, source: bool) -> OperatorTable:
    """Return at most `most` rows. Without `source`, rows have no line and merge all lines."""
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


def _sums(profile: Profile, source: bool) -> tuple[dict[_Key, _OperatorSum], list[_Key]]:
    sums: dict[_Key, _OperatorSum] = {}
    keys: list[_Key] = []
    for op in profile.operators:
        place = op.caller if op.caller >= 0 else op.place
        key = (op.name, op.phase, place if source else -1)
        keys.append(key)
        sums.setdefault(key, _OperatorSum()).count += 1
    for storage in profile.storages:
        if 0 <= storage.birth < len(keys):
            sums[keys[storage.birth]].made += storage.counted
    for sync in profile.syncs:
        if sync.operator >= 0:
            sums[keys[sync.operator]].waits += 1
    return sums, keys


def _row(profile: Profile, key: _Key, one: _OperatorSum, whole: float) -> OperatorRow:
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
    """A module: its name in its parent, its class, its bytes, its share in percent, and its children."""

    name: str
    type: str
    bytes: int
    share: float
    children: Sequence[ModuleNode]


def tree(profile: Profile) -> Sequence[ModuleNode]:
    """Return the roots, largest first. Modules below half a percent are summed as `others`."""
    modules = module_paths(profile)
    types = {module.path: module.type for module in profile.modules}
    total: dict[str, int] = defaultdict(int)  # Bytes of each path, including its children.
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
    whole = sum(total[root] for root in inside[""])
    return list(_nodes(total, inside, "", whole, types)) if whole else []


def _nodes(
    total: Mapping[str, int],
    inside: Mapping[str, list[str]],
    path: str,
    whole: int,
    types: Mapping[str, str],
) -> Iterator[ModuleNode]:
    ordered = sorted(inside.get(path, ()), key=lambda one: (-total[one], one))
    large = [one for one in ordered if total[one] >= _SMALL * whole][:_MOST_CHILDREN]
    sizes = [(one, one.removeprefix(f"{path}.") if path else one, total[one]) for one in large]
    if rest := ordered[len(large) :]:
        sizes.append(("", counted(len(rest), "other"), sum(total[one] for one in rest)))
    for one, name, size in sizes:
        yield ModuleNode(
            name=keep_right(clean(name), 40),
            type="" if types.get(one) == name else keep_right(types.get(one, ""), 40),
            bytes=size,
            share=100 * size / whole,
            children=list(_nodes(total, inside, one, whole, types)) if one else (),
        )


def count(nodes: Sequence[ModuleNode]) -> int:
    """Return the number of nodes, including children."""
    return sum(1 + count(node.children) for node in nodes)
