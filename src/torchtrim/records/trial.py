"""A trial: one run of a workload, original or planned, and the evidence it left."""

from __future__ import annotations

import statistics
from typing import Literal

from msgspec import Struct

from torchtrim.records.loader import LoaderCost, Tuning
from torchtrim.records.plan import CompiledGraph, Plan
from torchtrim.records.probes import Probe, ProbeResult
from torchtrim.records.profile import CompiledFunction, Profile
from torchtrim.records.sharding import Sharding


class TuningRequest(Struct, frozen=True, kw_only=True):
    """Limits for tuning a script's loader: seconds, bytes of prefetched batches, and cores."""

    seconds: float = 60.0
    memory: int | None = None
    cores: int | None = None


class Request(Struct, frozen=True, kw_only=True):
    """A run to make: `warmup` steps, one recorded step, and `steps` that are timed and compared.

    `times`: number of further steps to record operator times for, if the workload runs that long.
    `keep`: evidence whose values to save in a folder, as `"step/quantity:name"`. `digests`: hash it.
    `double`: run in float64. `nudged`: seed of a run whose numbers move by one unit in
    the last place, 0 for none.
    `dry`: compute nothing, and model the memory it would need.
    `batch_size`: batch size of the script's loaders, None for their own.
    `infers`: the script only runs inference; a step is a call of its first model. With `dry` the
    recorded call is the one with the highest peak, of all until that no longer rises.
    `texts`: source to run in place of files, by absolute path. `probes`: expressions to observe.
    `measured`: measure figures, not only evidence. `exported`: a Python file whose `apply` replaces the
    plan's. `traced`: the index of a step to record with a digest of each operator's output, or -1.
    `streams`: the order of an emulated device's streams; if empty, work runs at launch.
    `host_memory`: bytes of host memory a plan may use, None for no limit. `tunes`: tune the loader after the
    compared steps. `by_hand`: apply the plan's SEMANTIC techniques as a person would write them. `grows`:
    look for containers that grow from step to step. `round_trip`: save and load models and optimizers
    before the last step. `compiles`: leave the script's `torch.compile` on, and record no operators.
    `graphs_save`: compile without kernels, and plan the compiled graphs to need this many bytes less, or -1.
    `phases`: the peak of each phase of the step to plan, as measured.
    `ranks`: size of a fake process group in a dry run, which runs as its first rank, or 0. `sharding`: shard
    the models over these ranks.
    """

    plan: Plan | None = None
    steps: int = 3
    warmup: int = 1
    keep: tuple[str, ...] = ()
    digests: bool = True
    double: bool = False
    nudged: int = 0
    dry: bool = False
    infers: bool = False
    batch_size: int | None = None
    device: str | None = None
    texts: dict[str, str] = {}
    probes: tuple[Probe, ...] = ()
    times: int = 0
    measured: bool = True
    exported: str = ""
    traced: int = -1
    streams: str = ""
    host_memory: int | None = None
    tunes: TuningRequest | None = None
    by_hand: bool = False
    grows: bool = False
    round_trip: bool = False
    ranks: int = 0
    sharding: Sharding | None = None
    compiles: bool = False
    graphs_save: int = -1
    phases: dict[str, int] = {}

    @property
    def searches(self) -> bool:
        """True if the call with the highest peak is looked for."""
        return self.infers and self.dry

    @property
    def total(self) -> int:
        """The number of all steps."""
        return self.warmup + 1 + self.steps


class RootCall(Struct, frozen=True, kw_only=True):
    """A call of a root module from user code: its mode, and its inputs, such as `"float32[8, 3]"`.

    Behind them is `"autocast to bfloat16"`, if that is on.
    """

    root: str
    training: bool
    inputs: tuple[str, ...]


class TrialStep(Struct, kw_only=True):
    """One step: digests by `"quantity:name"`, in the order they were computed.

    `calls`: each kind of call of a root, once. `inputs`: digests of the roots' inputs. A loss that is not
    finite is None, since JSON has no such number. `left_bytes`: bytes live after the step minus those before.
    `state_bytes`: parameters and buffers of the roots that were first called in this step. `phases`: the peak
    of each phase that compiled graphs have marked.
    """

    digests: dict[str, str] = {}
    calls: list[RootCall] = []
    inputs: dict[str, str] = {}
    losses: list[float | None] = []
    seconds: float = 0.0
    peak_bytes: int = 0
    reserved_bytes: int | None = None
    left_bytes: int = 0
    state_bytes: int = 0
    phases: dict[str, int] = {}


class Crash(Struct, frozen=True, kw_only=True):
    """A failure of the workload: its `kind`, the error, and the last operator and line before it.

    `place`: the planned place that failed, empty if not known.
    """

    kind: Literal["crashed", "exited", "out of memory", "no step", "refused"]
    message: str
    traceback: str = ""
    operator: str = ""
    shapes: str = ""
    phase: str = ""
    path: str = ""
    line: int = 0
    place: str = ""


class CompiledMemory(Struct, frozen=True, kw_only=True):
    """The compiled graphs of a step: their number of calls, and the bytes simulated from Inductor's code.

    `graphs`: the bytes that each graph saves and its peak alone. `planned_peak` and `plan`: of a plan
    within the requested peak, or else of the smallest peak found. `added_seconds`: its recomputation by a
    model of costs.
    """

    calls: int
    saved_bytes: int
    peak_bytes: int
    graphs: tuple[tuple[int, int], ...]
    planned_peak: int = 0
    plan: tuple[CompiledGraph, ...] = ()
    added_seconds: float = 0.0
    unmeasured: tuple[str, ...] = ()


class Trial(Struct, kw_only=True):
    """The evidence of one run. `profile` describes the recorded step, or the step that failed.

    `notes` list differences of an emulated device from a real one, and assumptions of a dry run.
    `elsewhere`: calls of modules in threads that are not watched. `batch_size`: batch size of the script's
    loaders in a dry run, None if there was none. `call_bytes`: bytes of a call according to the memory plans
    of the models, None if a part has none. `processes`: processes the script started itself, excluding
    loader workers. `digests`: of each operator's output, in a traced step; `lines`: the line of user code
    behind each operator, and True if it called the operator itself, not through `backward`. `ranks`: the
    trial of each rank of a job; this trial is then the one with the highest peak. `workspace_bytes`: bytes
    that an emulated device holds for cuBLAS beside its peak. `loader`: the cost of the loader; `tuning`: the
    result of tuning it. `sharded`: the modules that were sharded one by one.
    `backends`: those of `torch.compile` that the script named. `compiled`: the compiled graphs, of a request
    that plans them; `unplanned`: why they could not be planned. `again`: functions compiled in several steps,
    or in parts.
    """

    request: Request
    device: str = "cpu"
    profile: Profile | None = None
    recorded: int = -1
    steps: list[TrialStep] = []
    forwards: int = 0
    elsewhere: int = 0
    backwards: int = 0
    optimizer_steps: int = 0
    processes: int = 0
    fingerprint: dict[str, str] = {}
    seeds: Literal["script", "torchtrim"] = "torchtrim"
    rss_bytes: int | None = None
    notes: tuple[str, ...] = ()
    batch_size: int | None = None
    call_bytes: int | None = None
    observed: tuple[ProbeResult, ...] = ()
    digests: tuple[str, ...] = ()
    lines: tuple[tuple[str, int, bool], ...] = ()
    crash: Crash | None = None
    ranks: tuple[Trial, ...] = ()
    loader: LoaderCost | None = None
    tuning: Tuning | None = None
    sharded: tuple[str, ...] = ()
    workspace_bytes: int = 0
    backends: tuple[str, ...] = ()
    compiled: CompiledMemory | None = None
    unplanned: str = ""
    again: tuple[CompiledFunction, ...] = ()

    @property
    def timed(self) -> list[TrialStep]:
        """The timed steps, or the recorded step if there are none."""
        timed = self.steps[self.request.warmup + 1 :]
        return timed or self.steps[-1:]

    @property
    def seconds(self) -> float:
        """Median time of the timed steps."""
        return statistics.median(step.seconds for step in self.timed) if self.steps else 0.0

    @property
    def peak_bytes(self) -> int:
        """Highest peak of all measured steps, or of the last one if the script ends before they begin."""
        measured = self.steps[self.request.warmup :] or self.steps[-1:]
        peaks = [step.peak_bytes for step in measured]
        recorded = self.profile.peak_bytes if self.profile else 0
        return max((*peaks, recorded))
