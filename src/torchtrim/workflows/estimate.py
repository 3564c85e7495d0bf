"""Estimates of a workload by dry runs: its memory, and the largest batch that fits a budget."""

from __future__ import annotations

import contextlib
import functools
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from msgspec.structs import replace
from torch.nn.parameter import is_lazy

from torchtrim.analysis.peak import holders
from torchtrim.analysis.timeline import by_kind, peak_operator
from torchtrim.capture.recording import tensors_in
from torchtrim.capture.workload import Inference, TrainStep
from torchtrim.core.units import check_bytes, format_bytes, parse_bytes
from torchtrim.core.words import first_line
from torchtrim.costs.devices import DEVICES
from torchtrim.costs.roofline import estimate
from torchtrim.dryrun.run import dry_run
from torchtrim.emulator.device import emulate
from torchtrim.emulator.runtime import model_named
from torchtrim.errors import NothingTrains, ScriptFailed, Unsupported, UsageError
from torchtrim.planner.estimate import estimate_of, has_samples, largest_length, unused_bytes
from torchtrim.planner.stages.chain import ChainReader
from torchtrim.planner.stages.spread import FABRIC, Fabric, RankLayout, SimulatedLayout, spread
from torchtrim.records.budget import MemoryKind
from torchtrim.records.estimate import EstimateReport, GrowthLimit
from torchtrim.records.profile import Profile, is_emulated
from torchtrim.records.report import Holder, Result
from torchtrim.records.sharding import ShardedModel
from torchtrim.records.trial import Request, Trial
from torchtrim.report.assemble import figures_of
from torchtrim.runner.script import Script, working_folder
from torchtrim.runner.trials import Model, Progress, Workload, run_trial
from torchtrim.workflows.findings import report_of

_DEVICES = ("cpu", "emulated", *DEVICES)
_REQUEST = Request(steps=0, warmup=1, dry=True)


class Estimate:
    """Memory that a workload would need, by a dry run.

    `peak_bytes`: highest bytes allocated, on an emulated device in the caching allocator's blocks;
    `reserved_bytes`: bytes held by that allocator, None on the CPU. Budgets limit the figure of
    `memory_kind`, and percentages are of it. `by_kind` and `by_module` split the peak, and `holders` lists
    its largest tensors with the reasons why they are live. `facts` has the exact bytes of parameters,
    gradients and optimizer state, the share of other tensors of this process (`unused_bytes`), and the peak
    with recomputation. `notes` list assumptions.
    """

    def __init__(
        self,
        workload: Workload | Callable[[], Model],
        *,
        device: str | None = None,
        request: Request = _REQUEST,
        memory_kind: MemoryKind = "allocated",
        progress: Progress = lambda _: None,
    ) -> None:
        if memory_kind == "rss":
            raise UsageError(
                "memory kind rss: a dry run allocates nothing, so it cannot tell the memory of the process. "
                "Use allocated or, for a device, reserved."
            )
        self.memory_kind = memory_kind
        self._progress = progress
        if request.ranks < 0:
            raise UsageError(f"{request.ranks} ranks: give at least 1.")
        if request.sharding is not None and not request.ranks:
            raise UsageError(
                "sharding needs the number of ranks: --ranks 8, or estimate(..., ranks=8)."
            )
        self._request = replace(request, dry=True, steps=0)
        self._make = _maker(workload, self._request)
        self.workload, self._made_notes = _built(workload)
        self.device = _checked(self.workload, device)
        try:
            self.trial = self._run(self.workload)
        except NothingTrains:
            self._request = replace(self._request, infers=True, warmup=0)
            self.trial = self._run(self.workload)
        assert self.trial.profile is not None
        self.profile: Profile = self.trial.profile
        if memory_kind == "reserved" and not self.reserved_bytes:
            raise Unsupported(
                f"memory kind reserved: {self.profile.device} has no caching allocator that reserves memory. "
                "Estimate for a device, such as --device h100, or use allocated."
            )
        self._known: dict[str, dict[int, int | None]] = {}
        self._refused: dict[str, dict[int, str]] = {}

    @functools.cached_property
    def facts(self) -> EstimateReport:
        """Further figures; the first access searches for the peak with recomputation."""
        ranks, blocks = self._request.ranks, self.trial.sharded
        shards = ShardedModel(ranks=ranks, blocks=blocks, options=self._request.sharding)
        sharded = shards if ranks else None
        return replace(estimate_of(self.profile), sharded=sharded, workspace_bytes=self._beside)

    @functools.cached_property
    def _unused(self) -> int:
        return unused_bytes(self.profile)

    @property
    def peak_bytes(self) -> int:
        """Highest bytes allocated in a step, including bytes live before the step."""
        return self.profile.peak_bytes

    @property
    def reserved_bytes(self) -> int | None:
        """Bytes that the caching allocator would hold; None on the CPU, which has none."""
        return self.profile.reserved_bytes

    @property
    def by_kind(self) -> dict[str, int]:
        """Bytes at the peak by their kind."""
        return by_kind(self.profile, peak_operator(self.profile))

    @property
    def by_module(self) -> dict[str, int]:
        """Bytes at the peak by module, the largest first."""
        return {one.path: one.bytes for one in self.facts.modules}

    @property
    def holders(self) -> tuple[Holder, ...]:
        """The largest tensors at the peak, and the reasons why they are live."""
        return holders(self.profile)

    @property
    def notes(self) -> tuple[str, ...]:
        """The assumptions, with their places."""
        notes = (*self._made_notes, *self.trial.notes)
        modules = () if isinstance(self.workload, Script) else self.workload.model.modules()
        compiled = [
            type(module).__name__
            for module in modules
            if type(module).__module__.startswith("torch._dynamo") or module._compiled_call_impl
        ]
        if not compiled:
            return notes
        return (
            *notes,
            f"{', '.join(compiled)}: compiled, but counted as uncompiled; fused operators may "
            "need less, "
            "and the compiler's own buffers more",
        )

    def fits(self, memory: str | int) -> bool:
        """Return True if the workload fits in a budget such as `"80GiB"`."""
        return self.bytes_held + self._beside <= parse_bytes(memory)

    def max_batch(self, memory: str | int) -> int:
        """Return the largest batch found to fit, or 0. A batch of one more does not fit.

        Raises `UsageError` if the batch has no samples to grow by, or if other tensors of this process fill
        the budget already.
        """
        return self.grown("batch", memory).largest

    def max_sequence(self, memory: str | int) -> int:
        """Return the longest sequence that fits, by the batch's second dimension; see `max_batch`."""
        return self.grown("sequence", memory).largest

    @property
    def bytes_held(self) -> int:
        """The bytes that have to fit: the allocated peak, or what is reserved if that is `memory_kind`."""
        return self._held(self.profile)

    @property
    def _beside(self) -> int:
        """Workspaces that a budget counts beside `bytes_held`: reserved bytes have them."""
        return 0 if self.memory_kind == "reserved" else self.trial.workspace_bytes

    def _held(self, profile: Profile) -> int:
        reserved = profile.reserved_bytes if self.memory_kind == "reserved" else None
        return reserved or profile.peak_bytes

    def __repr__(self) -> str:
        reserved = f", {format_bytes(self.reserved_bytes)} reserved" if self.reserved_bytes else ""
        return f"<Estimate of {format_bytes(self.peak_bytes)}{reserved} on {self.profile.device}>"

    def grown(self, what: str, memory: str | int) -> GrowthLimit:
        """Return the largest batch, or longest sequence, within the budget. Raises as `max_batch`."""
        budget = parse_bytes(memory, whole=self.bytes_held)
        now, at = self._lengths(what)
        unused = self._unused
        if unused and budget <= unused:
            raise UsageError(
                _TAKEN.format(unused=format_bytes(unused), budget=format_bytes(budget))
            )
        refused = self._refused.setdefault(what, {})
        known = self._known.setdefault(what, {now: self.bytes_held})
        in_script = isinstance(self.workload, Script) and has_samples(self.profile, now)

        def peak_of(length: int) -> int | None:
            self._progress(f"{what} of {length}")
            try:
                other = at(length)
                profile = self._run(other).profile
            except (RuntimeError, ValueError, IndexError, ScriptFailed) as error:
                refused[length] = f"{type(error).__name__}: {first_line(error)}"
                known[length] = None  # not before: an interrupted run says nothing
                return None
            assert profile is not None
            if in_script and not has_samples(profile, length):
                refused[length] = "no second step of the script has that many samples"
                known[length] = None
            else:
                known[length] = self._held(profile) - self.given_bytes(profile, other)
            return known[length]

        limit = largest_length(peak_of, budget - self._beside, now, known)
        return GrowthLimit(
            what="batch" if what == "batch" else "sequence",
            budget_bytes=budget,
            now=now,
            largest=limit.length,
            peak_bytes=limit.peak,
            next_bytes=limit.next_peak,
            limited_by=refused.get(limit.length + 1, ""),
            tried=limit.tried,
            falls=limit.falls,
            unused_bytes=unused,
        )

    def at(self, what: str, length: int) -> tuple[Workload, dict[str, Any]]:
        """Return the workload at another length, and further fields of its request."""
        now, sized = self._lengths(what)
        workload = sized(length) if length != now else self.workload
        if isinstance(workload, _Sized):
            return workload.script, {"batch_size": workload.size}
        return workload, {}

    def given_bytes(self, profile: Profile, other: Workload | _Sized) -> int:
        """Return the bytes of the original batch in the peak of another length, to subtract them."""
        if profile.reserved_bytes or isinstance(other, (Script, _Sized)):
            return 0
        assert not isinstance(self.workload, Script)
        beside = max(unused_bytes(profile) - self._unused, 0)
        return min(beside, other.replaced_bytes(self.workload))

    def _lengths(self, what: str) -> tuple[int, Callable[[int], Workload | _Sized]]:
        workload = self.workload
        if isinstance(workload, Script):
            size = self.trial.batch_size
            if what != "batch" or size is None:
                raise UsageError(
                    f"a script's {what} length is not known: torchtrim can set the batch size of a "
                    "torch.utils.data.DataLoader, and this script has none that batches. Give the length "
                    "as an argument of the script and estimate it at two, or use torchtrim.estimate."
                )
            return size, lambda length: _Sized(workload, length)
        dimension = 0 if what == "batch" else 1
        now = _common_length(workload, dimension)
        if now is None:
            raise UsageError(
                f"the batch has no tensor with a {what} length (dimension {dimension}), so it cannot be "
                "made longer. Pass a batch of tensors with the samples in the first dimension."
            )
        return now, lambda length: self._fresh().resized(dimension, now, length)

    def _fresh(self) -> Model:
        """Return the live workload, rebuilt if sharded, since sharding cannot be undone."""
        workload = self.workload if self._make is None else _built(self._make)[0]
        assert not isinstance(workload, Script)
        return workload

    def _run(self, sized: Workload | _Sized) -> Trial:
        workload, size = sized if isinstance(sized, _Sized) else (sized, None)
        device = None if isinstance(workload, Script) else self.device
        request = replace(self._request, batch_size=size, device=device)
        emulation: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()
        if device is not None and is_emulated(device):
            emulation = emulate(model_named(device.partition(" ")[2]))
        with working_folder() as folder, emulation:
            tell = lambda text: self._progress(f"dry run: {text}")  # noqa: E731
            trial = run_trial(workload, request, folder, tell)
        if trial.profile is None or not trial.profile.operators:
            raise Unsupported(
                "the step ran no operator that torchtrim could estimate. Is the model a torch.nn.Module "
                "that computes on tensors?"
            )
        return trial


def estimate_report(
    script: Script,
    request: Request,
    *,
    fits: str | None = None,
    max_batch: str | None = None,
    memory_kind: MemoryKind = "allocated",
    grown: Callable[[Estimate], GrowthLimit] | None = None,
    progress: Progress = lambda _: None,
) -> Result:
    """Estimate a script, and the largest batch of its loaders that fits.

    `grown`: a search for the largest batch in place of the estimate's own.
    """
    budget = parse_bytes(fits) if fits is not None else None
    if max_batch is not None:
        check_bytes(max_batch, share=True)
    estimated = Estimate(
        script, device=script.device, request=request, memory_kind=memory_kind, progress=progress
    )
    facts, profile = estimated.facts, estimated.profile
    if grown is not None:
        facts = replace(facts, growth=(grown(estimated),))
    elif max_batch is not None:
        facts = replace(facts, growth=(estimated.grown("batch", max_batch),))
    report = report_of(
        "estimate", script, replace(estimated.trial, profile=_without_times(profile))
    )
    findings = (one for one in report.findings if one.code.startswith("TT2"))
    figures = figures_of(estimated.trial)
    report = replace(
        report,
        original=replace(figures, step_seconds=0.0, spread_seconds=0.0, rss_bytes=None),
        findings=tuple(replace(one, price_ms=None) for one in findings),
        waiting=None,
        steps=0,
        budget_bytes=budget,
        memory_kind=memory_kind,
        estimated=facts,
    )
    return Result(report, profile)


def _without_times(profile: Profile) -> Profile:
    """Return a dry run's profile without the times of operators, which computed nothing."""
    return replace(profile, operators=[replace(op, seconds=0.0) for op in profile.operators])


class _Sized(NamedTuple):
    """Script with another batch size of its loaders."""

    script: Script
    size: int | None


_TAKEN = (
    "tensors of this process that the step does not use hold {unused}, so no batch fits in {budget}: they "
    "are a part of every peak here. Delete them first (another model, a data set, results of a notebook), "
    "estimate in a fresh process, or add them to the budget: they are `estimate(...).facts.unused_bytes`."
)


def _built(workload: Workload | Callable[[], Model]) -> tuple[Workload, tuple[str, ...]]:
    """Return the workload, and the assumptions of its dry construction if a function makes it."""
    if isinstance(workload, (Script, TrainStep, Inference)):
        return workload, ()
    if isinstance(workload, torch.nn.Module) or not callable(workload):
        raise UsageError(
            f"estimate takes a TrainStep, an Inference, a Script, or a function that makes one, "
            f"not {type(workload).__name__}. For a model: torchtrim.Inference(model, inputs)."
        )
    with dry_run(str(Path.cwd()), owned_only=False) as dry:
        built = workload()
    if not isinstance(built, (TrainStep, Inference)):
        raise UsageError(
            f"the function returned {type(built).__name__}, not a TrainStep or an Inference."
        )
    return built, dry.guesses.notes()


def _maker(
    workload: Workload | Callable[[], Model], request: Request
) -> Callable[[], Model] | None:
    """Return the function that builds the workload, if it has to be built again.

    Raises `UsageError` for a live model that would be sharded.
    """
    if request.sharding is None or isinstance(workload, Script):
        return None
    if isinstance(workload, (TrainStep, Inference)):
        raise UsageError(
            "fully_shard changes a model permanently, so the estimate creates its own: pass a "
            "function, `estimate(lambda: TrainStep(...), ranks=8)`, whose tensors take no memory."
        )
    return workload


def _checked(workload: Workload, device: str | None) -> str | None:
    """Return the device's name in a profile. Raises `UsageError` for one that cannot be estimated."""
    if isinstance(workload, Script):
        return device
    if device not in (None, *_DEVICES):
        raise UsageError(f"device={device!r}: an estimate is for {', '.join(map(repr, _DEVICES))}.")
    tensors = [*workload.model.parameters(), *workload.model.buffers()]
    if any(is_lazy(tensor) for tensor in tensors):
        raise Unsupported(
            "the model has lazy parameters that have no shape yet. Run it once on a batch of one sample."
        )
    others = Counter(tensor.device.type for tensor in tensors if tensor.device.type != "cpu")
    if others:
        kind = next(iter(others))
        raise UsageError(
            f"{others[kind]} of the model's tensors are on {kind}, but an estimate needs a "
            "model on the CPU, whatever the device. Pass a function that makes it, "
            "`estimate(lambda: "
            "TrainStep(...))`, "
            'whose tensors take no memory; for a GPU add device="h100".'
        )
    if device in (None, "cpu"):
        return "cpu"
    return "emulated" if device == "emulated" else f"emulated {device}"


def _common_length(workload: Model, dimension: int) -> int | None:
    sizes = Counter(
        tensor.shape[dimension]
        for tensor in tensors_in(workload.batch)
        if (tensor.dim() in (2, 3) if dimension else tensor.dim())
    )
    return sizes.most_common(1)[0][0] if sizes else None


def spread_over(
    workload: Workload | Callable[[], Model],
    devices: int,
    *,
    memory: str | int,
    batch: int,
    device: str = "h100",
    fabric: Fabric = FABRIC,
    layouts: Sequence[RankLayout] = (),
    progress: Progress = lambda _: None,
) -> tuple[SimulatedLayout, ...]:
    """Return stages x replicas x shards for a step of `batch` samples on `devices`, quickest first.

    The workload runs dry once, with the samples it has. Seconds are at the device's full rates
    (`costs.devices`), so a real step takes longer; only their order matters. Raises `InfeasibleBudget`,
    `Unsupported`, `UsageError`.
    """
    if device not in DEVICES:
        raise UsageError(f"unknown device {device!r}: give one of {', '.join(DEVICES)}.")
    if devices < 1 or batch < 1:
        raise UsageError(f"{batch} samples on {devices} devices: give at least one of each.")
    budget = parse_bytes(memory)
    profile = Estimate(workload, device=device, progress=progress).profile
    times = estimate(profile, DEVICES[device]).device_seconds
    reader = ChainReader(profile, 0.0, times)
    progress("looking for stages, replicas and shards")
    chain_of = functools.lru_cache(maxsize=None)(reader.chain)
    # Late, since torch's pipelining imports dynamo and inductor, which takes seconds.
    from torchtrim.pipelines.orders import order_of

    return spread(chain_of, devices, batch, budget, order_of, fabric, layouts)
