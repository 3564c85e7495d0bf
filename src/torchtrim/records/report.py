"""A report: all that one verb found, as the JSON that people script against. One schema for all verbs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, NamedTuple

import msgspec
from msgspec import Struct

from torchtrim.records.allow import Allowed
from torchtrim.records.budget import MemoryKind
from torchtrim.records.certificate import Certificate
from torchtrim.records.estimate import Estimated
from torchtrim.records.figures import Bytes as Bytes
from torchtrim.records.figures import Figures as Figures
from torchtrim.records.finding import Finding, Source
from torchtrim.records.fix import Fixes
from torchtrim.records.job import ExchangeRow, RankFigures
from torchtrim.records.lever import Lever, Part
from torchtrim.records.loader import Tuning
from torchtrim.records.pipeline import PipelineReport
from torchtrim.records.plan import Plan, Prediction, Status, Technique
from torchtrim.records.profile import Profile

if TYPE_CHECKING:
    from torchtrim.records.kept_certificate import KeptCertificate


class PlanSummary(Struct, frozen=True, kw_only=True):
    """A plan without what only its file needs.

    `status` and `bound_seconds` are the plan's; `gap` is by how much its step may be slower than the quickest
    that fits, as a share of it, None if unknown.
    """

    techniques: tuple[Technique, ...]
    predicted: Prediction
    status: Status = "feasible"
    bound_seconds: float | None = None
    gap: float | None = None


class FrontierPoint(Struct, frozen=True, kw_only=True):
    """What the best plan under a budget is predicted to need.

    `by_hand`: what a person would do instead, where it is no plan; its budget is its own peak.
    """

    budget_bytes: Bytes
    peak_bytes: Bytes
    step_seconds: float
    where: tuple[str, ...]
    by_hand: str = ""


class Holder(Struct, frozen=True, kw_only=True):
    """Storages live at the peak that one module and line allocated, and why they still were."""

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


class TunedLoader(Struct, frozen=True, kw_only=True):
    """The settings found for a script's loader. `ready_seconds` is of its step with the batch already there.

    `change` has the arguments that change, `diff` the line that makes the loader, where it can be written.
    """

    tuning: Tuning
    step_seconds: float
    ready_seconds: float | None
    change: str
    diff: str = ""


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

    `floor_bytes` is the smallest feasible peak, where a budget cannot be met; `planned` then is the plan that
    needs so much, and `levers` say what each technique would reach, the quickest first. `peak_parts` is what
    the peak that counts is made of: the planned one where a budget is missed, else the original's. `next` is
    the command to run next. `project` is the folder of user code, `machine` the processor and
    its threads. `allowed` is what the
    allow-list covers of the findings. `waiting` is null where nothing waits or no device is known.
    `stream` is null but for verbs that watch a stream, `fixes` but for those that write source,
    `estimated` but for an estimate, `tuned` but where a loader was tuned, `pipeline` but for one in stages.
    `ranks` are the ranks of a job, whose largest the other figures are of, and `exchanges` what they
    exchanged.
    """

    schema_version: Literal[2] = 2
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
    floor_bytes: Bytes | None = None
    memory_kind: MemoryKind = "allocated"
    findings: tuple[Finding, ...] = ()
    holders: tuple[Holder, ...] = ()
    peak_parts: tuple[Part, ...] = ()
    levers: tuple[Lever, ...] = ()
    plan: PlanSummary | None = None
    frontier: tuple[FrontierPoint, ...] = ()
    certificate: Certificate | None = None
    notes: tuple[str, ...] = ()
    allowed: tuple[Allowed, ...] = ()
    waiting: Waiting | None = None
    stream: Stream | None = None
    fixes: Fixes | None = None
    estimated: Estimated | None = None
    tuned: TunedLoader | None = None
    pipeline: PipelineReport | None = None
    next: str = ""
    ranks: tuple[RankFigures, ...] = ()
    exchanges: tuple[ExchangeRow, ...] = ()


def schema() -> dict[str, object]:
    """JSON Schema of `--json`."""
    return msgspec.json.schema(Report)


class Result(NamedTuple):
    """What a verb gives: the report, and what was too large for it. `exported`: the plan as plain PyTorch.
    `certificate`: the report's, as a file that can be repeated. `ranks`: the profiles of all of a job."""

    report: Report
    before: Profile | None = None
    after: Profile | None = None
    plan: Plan | None = None
    exported: str = ""
    certificate: KeptCertificate | None = None
    ranks: tuple[Profile, ...] = ()
