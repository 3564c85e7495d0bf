"""Where a step's time goes: parts that add up to the whole, and for each whole where it is from."""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from torchtrim.core.units import format_seconds
from torchtrim.records import Profile, Report
from torchtrim.records.finding import Source
from torchtrim.records.profile import is_emulated
from torchtrim.records.report import Waiting

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


@dataclass(frozen=True, kw_only=True)
class Part:
    """A part of the step. `share` is in percent."""

    kind: str
    name: str
    seconds: float
    share: float


@dataclass(frozen=True, kw_only=True)
class Split:
    """A step's time in parts, the whole first. `said` tells how to read it."""

    title: str
    source: Source
    seconds: float
    parts: Sequence[Part]
    said: str


def splits(report: Report, profile: Profile | None) -> list[Split]:
    """The step's time as it is known: modelled for a GPU that is emulated, and as measured."""
    found = []
    if report.waiting is not None and report.waiting.step_ms:
        found.append(_modelled(report.waiting))
    if profile is not None and profile.operators:
        found.append(_measured(report, profile))
    return [one for one in found if one.seconds > 0]


def _modelled(waiting: Waiting) -> Split:
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


def _measured(report: Report, profile: Profile) -> Split:
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


def _split(title: str, source: Source, seconds: Mapping[str, float], said: str) -> Split:
    whole = sum(seconds.values())
    return Split(
        title=title, source=source, seconds=whole, parts=list(_parts(seconds, whole)), said=said
    )


def _parts(seconds: Mapping[str, float], whole: float) -> Iterator[Part]:
    for kind, name in _NAMES.items():
        if seconds.get(kind, 0.0) > 0:
            share = 100 * seconds[kind] / whole
            yield Part(kind=kind, name=name, seconds=seconds[kind], share=share)
