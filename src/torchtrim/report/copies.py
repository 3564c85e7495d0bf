"""A planned step with activations away for a while: what its copies hide behind, where it waits."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from torchtrim.analysis.prices import device_of
from torchtrim.core.units import format_bytes, format_seconds
from torchtrim.errors import ApplyFailed
from torchtrim.records.plan import Technique
from torchtrim.records.profile import Profile, is_emulated
from torchtrim.report.lanes import LaneSpan
from torchtrim.step.costs import on_device
from torchtrim.step.edits import Edit
from torchtrim.step.from_profile import step_of
from torchtrim.step.links import Traffic, traffic
from torchtrim.step.step import DETACH, Step
from torchtrim.techniques.offload_activations.places import placed
from torchtrim.techniques.offload_activations.windows import edit_of

_NAME = "offload_activations"


@dataclass(frozen=True, kw_only=True)
class CopyLanes:
    """Lanes of the planned step, in seconds from its start; spans have the operator's number.

    `out` and `home` have for each copy the operator that made what it copies. `awaited`: when compute
    pauses for one. `bytes` are those of the copies in one direction.
    """

    device_name: str
    seconds: float
    compute: Sequence[LaneSpan]
    out: Sequence[LaneSpan]
    home: Sequence[LaneSpan]
    awaited: Sequence[LaneSpan]
    bytes: int

    @property
    def said(self) -> str:
        """What hides, in words."""
        copied = sum(span.seconds for span in (*self.out, *self.home))
        waited = sum(span.seconds for span in self.awaited)
        hidden = 100 * (1 - min(waited / copied, 1.0)) if copied else 100.0
        return (
            f"Modelled for an {self.device_name.upper()}: {len(self.out)} activations of "
            f"{format_bytes(self.bytes)} go to the host and come back in {format_seconds(copied)}, of which "
            f"{hidden:.0f} % hide behind compute; it stands still for {format_seconds(waited)}."
        )


def copies_of(profile: Profile, techniques: Iterable[Technique]) -> CopyLanes | None:
    """The lanes of a plan for the step of this profile; None where it copies nothing, or not in this step."""
    where = [place for one in techniques if one.name == _NAME for place in one.where]
    if not where or not profile.operators or not is_emulated(profile.device):
        return None
    step = on_device(step_of(profile), device_of(profile))
    edits = [edit for place in where if (edit := _edit(step, place)) is not None]
    found = traffic(step, edits)
    return _lanes(step, found, device_of(profile).name) if found.copies else None


def _edit(step: Step, where: str) -> Edit | None:
    try:
        place, room = placed(where)
    except ApplyFailed:
        return None
    return edit_of(step, place, in_file=room.in_file)


def _lanes(step: Step, found: Traffic, device: str) -> CopyLanes:
    tasks = [task for task, _ in found.delays]
    delays = [0.0, *(delay for _, delay in found.delays)]
    compute = [
        LaneSpan(
            start=start + delays[bisect_right(tasks, number)], seconds=task.seconds, index=number
        )
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
