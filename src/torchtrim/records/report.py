"""A report: the complete result of one verb, as JSON for scripts. All verbs share one schema."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, NamedTuple

from msgspec import Struct

from torchtrim.records.allow import AllowedFinding
from torchtrim.records.budget import MemoryKind
from torchtrim.records.certificate import Certificate
from torchtrim.records.estimate import EstimateReport
from torchtrim.records.figures import Bytes as Bytes
from torchtrim.records.figures import ExchangeRow, Lever, PeakPart, RankFigures
from torchtrim.records.figures import Figures as Figures
from torchtrim.records.finding import Finding, Source
from torchtrim.records.fix import Fixes
from torchtrim.records.loader import Tuning
from torchtrim.records.pipeline import PipelineReport
from torchtrim.records.plan import Plan, Prediction, Status, Technique
from torchtrim.records.profile import Profile

if TYPE_CHECKING:
    from torchtrim.records.certificate import KeptCertificate


class PlanSummary(Struct, frozen=True, kw_only=True):
    """A plan without the fields that only its file needs.

    `status` and `bound_seconds` are the plan's; `gap` is the share of its step that a faster plan could save
    at most, None if unknown. `words` says what each technique does and where. `graphs`: number of compiled
    graphs whose saved tensors it sets.
    """

    techniques: tuple[Technique, ...]
    predicted: Prediction
    status: Status = "feasible"
    bound_seconds: float | None = None
    gap: float | None = None
    words: tuple[str, ...] = ()
    graphs: int = 0


class FrontierPoint(Struct, frozen=True, kw_only=True):
    """The predicted peak and time of the best plan under a budget.

    `by_hand`: the description of a manual alternative, if not a plan; its budget is its own peak. `device`:
    the device that `step_seconds` are modelled for, empty for the machine of the run. `techniques`: the
    number of places of each technique, most places first.
    """

    budget_bytes: Bytes
    peak_bytes: Bytes
    step_seconds: float
    where: tuple[str, ...]
    by_hand: str = ""
    device: str = ""
    techniques: dict[str, int] = {}


class Holder(Struct, frozen=True, kw_only=True):
    """Storages live at the peak that one module and line allocated, and why they were still live.

    `type` is the module's class, `made_path` and `made_line` the line that constructed it, empty and 0 if not
    known. `what` says what the tensors are, such as `"logits"`, if that is known.
    """

    bytes: Bytes
    count: int
    kind: str
    module: str
    path: str
    line: int
    why: str
    type: str = ""
    made_path: str = ""
    made_line: int = 0
    what: str = ""


class WaitSet(Struct, frozen=True, kw_only=True):
    """Findings, by index, and the time the step would save without their waits."""

    findings: tuple[int, ...]
    saves_ms: float


class WaitCost(Struct, frozen=True, kw_only=True):
    """The cost of waits to a step on a device, in milliseconds. `bound`: what limits the step's time.

    The cost is not the sum of the waits: if one is removed, the next may wait for the same work.
    """

    device: str
    source: Source
    step_ms: float
    device_busy_ms: float
    bound: str
    all_saves_ms: float
    sets: tuple[WaitSet, ...] = ()


class TunedLoader(Struct, frozen=True, kw_only=True):
    """The best settings found for a script's loader.

    `ready_seconds` is the time of its step with the batch already in memory. `change` has the arguments that
    change, `diff` the edit of the line that creates the loader, if it can be written.
    """

    tuning: Tuning
    step_seconds: float
    ready_seconds: float | None
    change: str
    diff: str = ""


class StreamReport(Struct, frozen=True, kw_only=True):
    """Memory and time of a stream's frames. `growth_bytes` is the growth of containers per frame.

    `frame` describes a frame, `frames` is their number, `first` the frame where measuring growth began.
    `process_growth_bytes` is the growth of the process per frame, including the allocators' noise. Fields
    named `unbounded_*` describe the same stream without bounds, null if that was not run.
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
    """The result of a verb. A field is null only if the verb does not measure it.

    `floor_bytes` is the smallest feasible peak if the budget cannot be met; then `planned` is the plan with
    that peak, and `levers` list the peak each technique would reach, fastest first. `peak_parts` are the
    parts of the planned peak if the budget is missed, else of the original's. `next` is the command to run
    next. `project` is the folder of user code, `machine` the processor and its threads. `allowed` are the
    entries of the allow-list that cover findings. `waiting` is null if nothing waits or the device is not
    known. Only verbs that watch a stream set `stream`; only those that write source set `fixes`; `estimated`,
    `tuned` and `pipeline` belong to an estimate, a tuned loader and a model in stages. `compiled`: figures of
    an original left to `torch.compile`, whose findings are those of its eager run. `ranks` are the ranks
    of a job, with `exchanges` between them; the other figures belong to the rank with the highest peak.
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
    compiled: Figures | None = None
    planned: Figures | None = None
    budget_bytes: Bytes | None = None
    floor_bytes: Bytes | None = None
    memory_kind: MemoryKind = "allocated"
    findings: tuple[Finding, ...] = ()
    holders: tuple[Holder, ...] = ()
    peak_parts: tuple[PeakPart, ...] = ()
    levers: tuple[Lever, ...] = ()
    plan: PlanSummary | None = None
    frontier: tuple[FrontierPoint, ...] = ()
    certificate: Certificate | None = None
    notes: tuple[str, ...] = ()
    allowed: tuple[AllowedFinding, ...] = ()
    waiting: WaitCost | None = None
    stream: StreamReport | None = None
    fixes: Fixes | None = None
    estimated: EstimateReport | None = None
    tuned: TunedLoader | None = None
    pipeline: PipelineReport | None = None
    next: str = ""
    ranks: tuple[RankFigures, ...] = ()
    exchanges: tuple[ExchangeRow, ...] = ()


class Result(NamedTuple):
    """The result of a verb: the report, and everything too large for it.

    `exported`: the plan as plain PyTorch code. `certificate`: the report's certificate with everything needed
    to repeat it. `ranks`: the profiles of all ranks of a job.
    """

    report: Report
    before: Profile | None = None
    after: Profile | None = None
    plan: Plan | None = None
    exported: str = ""
    certificate: KeptCertificate | None = None
    ranks: tuple[Profile, ...] = ()
