"""A report: all that one verb found, as the JSON that people script against. One schema for all verbs."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta, Struct

from torchtrim.records.allow import Allowed
from torchtrim.records.certificate import Certificate
from torchtrim.records.estimate import Estimated
from torchtrim.records.finding import Finding, Source
from torchtrim.records.fix import Cures
from torchtrim.records.plan import MemoryKind, Prediction, Technique

Bytes = Annotated[int, Meta(ge=0)]


class Figures(Struct, frozen=True, kw_only=True):
    """What a step measures. `step_seconds` is the median of the timed steps, `spread_seconds` their range."""

    peak_bytes: Bytes
    tracked_peak_bytes: Bytes
    reserved_bytes: Bytes | None
    rss_bytes: Bytes | None
    step_seconds: float
    spread_seconds: float
    by_kind: dict[str, Bytes]


class PlanSummary(Struct, frozen=True, kw_only=True):
    """A plan without what only its file needs."""

    techniques: tuple[Technique, ...]
    predicted: Prediction


class FrontierPoint(Struct, frozen=True, kw_only=True):
    """What the best plan under a budget is predicted to need."""

    budget_bytes: Bytes
    peak_bytes: Bytes
    step_seconds: float
    where: tuple[str, ...]


class Holder(Struct, frozen=True, kw_only=True):
    """Storages alive at the peak that one module and line made, and why they still were."""

    bytes: Bytes
    count: int
    kind: str
    module: str
    path: str
    line: int
    why: str


class WaitSet(Struct, frozen=True, kw_only=True):
    """Findings, by number, whose waits go together, and what the step would gain without them."""

    findings: tuple[int, ...]
    saves_ms: float


class Waiting(Struct, frozen=True, kw_only=True):
    """What waits cost a step on a device, in milliseconds. `bound`: what the step's time depends on.

    The time is not the sum of the waits: where one goes, the next takes over what it waited for.
    """

    device: str
    source: Source
    step_ms: float
    device_busy_ms: float
    bound: str
    all_saves_ms: float
    sets: tuple[WaitSet, ...] = ()


class Stream(Struct, frozen=True, kw_only=True):
    """What the frames of a stream need. `growth_bytes` is what a frame adds to what containers hold.

    `frame` says what a frame is, `frames` how many there were, `first` from which on growth was measured.
    `process_growth_bytes` is what a frame added to the process, the allocators' noise included. The fields
    of `unbounded` are of the same stream without bounds, null where it was not run.
    """

    frame: str
    frames: int
    first: int
    growth_bytes: Bytes
    process_growth_bytes: int
    frame_seconds: float
    max_growth_bytes: Bytes | None = None
    bounded: tuple[str, ...] = ()
    unbounded_growth_bytes: Bytes | None = None
    unbounded_frame_seconds: float | None = None


class Report(Struct, frozen=True, kw_only=True):
    """What a verb found. A field is null only where the verb does not measure it.

    `smallest_bytes` is the smallest feasible peak, where a budget was refused. `project` is the folder
    of the user's own source, `machine` the processor and its threads. `allowed` is what the
    allow-list covers of the findings. `waiting` is null where nothing waits or no device is known.
    `stream` is null but for verbs that watch a stream, `cures` but for those that write source,
    `estimated` but for an estimate.
    """

    schema_version: Literal[1] = 1
    torchtrim: str
    torch: str
    verb: str
    device: str
    script: str
    steps: int
    project: str = ""
    machine: str = ""
    original: Figures | None = None
    planned: Figures | None = None
    budget_bytes: Bytes | None = None
    smallest_bytes: Bytes | None = None
    memory_kind: MemoryKind = "allocated"
    findings: tuple[Finding, ...] = ()
    holders: tuple[Holder, ...] = ()
    plan: PlanSummary | None = None
    frontier: tuple[FrontierPoint, ...] = ()
    certificate: Certificate | None = None
    notes: tuple[str, ...] = ()
    allowed: tuple[Allowed, ...] = ()
    waiting: Waiting | None = None
    stream: Stream | None = None
    cures: Cures | None = None
    estimated: Estimated | None = None


def schema() -> dict[str, object]:
    """JSON Schema of `--json`."""
    return msgspec.json.schema(Report)
