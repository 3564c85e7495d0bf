"""Estimates a workload: a dry run of it, what that says, and how far its batch can grow."""

from __future__ import annotations

import contextlib
import functools
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch.nn.parameter import is_lazy

from torchtrim.analysis.peak import holders
from torchtrim.analysis.prices import priced
from torchtrim.analysis.timeline import by_kind, peak_operator
from torchtrim.capture.recording import tensors_in
from torchtrim.capture.workload import Inference, TrainStep
from torchtrim.core.units import check_bytes, format_bytes, parse_bytes
from torchtrim.costs.devices import DEVICES
from torchtrim.costs.roofline import estimate
from torchtrim.dryrun.run import dry_run
from torchtrim.emulator.device import emulate
from torchtrim.emulator.runtime import model_named
from torchtrim.errors import ScriptFailed, Unsupported, UsageError
from torchtrim.pipelines.orders import order_of
from torchtrim.planner.estimate import estimate_of, has_samples, largest_length, unused_bytes
from torchtrim.planner.stages.chain import ChainReader
from torchtrim.planner.stages.spread import FABRIC, Fabric, RankLayout, SimulatedLayout, spread
from torchtrim.records.estimate import EstimateReport, GrowthLimit
from torchtrim.records.finding import Finding
from torchtrim.records.profile import Profile, is_emulated
from torchtrim.records.report import Holder, Result
from torchtrim.records.sharding import ShardedModel
from torchtrim.records.trial import Request, Trial
from torchtrim.report.assemble import figures_of
from torchtrim.rules.registry import diagnose as find
from torchtrim.runner.script import Script, working_folder
from torchtrim.runner.trials import Model, Progress, Workload, run_trial
from torchtrim.workflows.findings import report_of

_DEVICES = ("cpu", "emulated", *DEVICES)
_REQUEST = Request(steps=0, warmup=1, dry=True)


class Estimate:
    """What a workload would need, as far as that is known without running it.

    `peak_bytes` is the highest allocated, on a device that is emulated in the caching allocator's blocks;
    `reserved_bytes` what that allocator would hold, None on the CPU. `by_kind` and `by_module` say what
    and whose the bytes at the peak are, `holders` the largest of them and why they are alive; each adds
    up to the peak. `facts` has the bytes of parameters, gradients and optimizer state, exact, what other
    tensors of this process add to the peak (`unused_bytes`), and what recomputation would leave. `notes`
    name the assumptions where nobody could know.
    """

    def __init__(
        self,
        workload: Workload | Callable[[], Model],
        *,
        device: str | None = None,
        request: Request = _REQUEST,
        progress: Progress = lambda _: None,
    ) -> None:
        self._progress = progress
        self._request = _asked(msgspec.structs.replace(request, dry=True, steps=0))
        self._make = _maker(workload, self._request)
        self.workload, self._made_notes = _built(workload)
        self.device = _checked(self.workload, device)
        self.trial = self._run(self.workload)
        assert self.trial.profile is not None
        self.profile: Profile = self.trial.profile
        self._known: dict[str, dict[int, int | None]] = {}
        self._refused: dict[str, dict[int, str]] = {}

    @functools.cached_property
    def facts(self) -> EstimateReport:
        """What else is known; what recomputation would leave is searched for when first asked."""
        return msgspec.structs.replace(estimate_of(self.profile), sharded=self._sharded())

    def _sharded(self) -> ShardedModel | None:
        request = self._request
        if not request.ranks:
            return None
        return ShardedModel(
            ranks=request.ranks, blocks=self.trial.sharded, options=request.sharding
        )

    @functools.cached_property
    def _unused(self) -> int:
        return unused_bytes(self.profile)

    @property
    def peak_bytes(self) -> int:
        """The highest bytes allocated in a step, what is alive before it included."""
        return self.profile.peak_bytes

    @property
    def reserved_bytes(self) -> int | None:
        """What the caching allocator would hold; None on the CPU, which has none."""
        return self.profile.reserved_bytes

    @property
    def by_kind(self) -> dict[str, int]:
        """Bytes at the peak by what they are for."""
        return by_kind(self.profile, peak_operator(self.profile))

    @property
    def by_module(self) -> dict[str, int]:
        """Bytes at the peak by module, the largest first."""
        return {one.path: one.bytes for one in self.facts.modules}

    @property
    def holders(self) -> tuple[Holder, ...]:
        """The largest at the peak, and why they are alive."""
        return holders(self.profile)

    @property
    def notes(self) -> tuple[str, ...]:
        """The assumptions, and where they were made."""
        return (*self._made_notes, *self.trial.notes, *self._about_compiled())

    def _about_compiled(self) -> tuple[str, ...]:
        """What is not known of modules that were compiled before."""
        if isinstance(self.workload, Script):
            return ()
        compiled = [
            type(module).__name__
            for module in self.workload.model.modules()
            if type(module).__module__.startswith("torch._dynamo") or module._compiled_call_impl
        ]
        if not compiled:
            return ()
        return (
            f"{', '.join(compiled)}: compiled, and counted as it runs without; fused operators may need "
            "less, and the compiler's own buffers more",
        )

    def fits(self, memory: str | int) -> bool:
        """Whether it fits in `"80GiB"`: what the caching allocator holds, or on the CPU the peak."""
        return self.bytes_held <= parse_bytes(memory)

    def max_batch(self, memory: str | int) -> int:
        """The largest batch that was found to fit; 0 for none. One more would not fit, nor do a few larger
        ones that were tried; `grown` says what is known of others.

        Raises `UsageError` where the batch has no samples that could be more, and where other tensors of
        this process hold the budget already.
        """
        return self.grown("batch", memory).largest

    def max_sequence(self, memory: str | int) -> int:
        """The longest sequence that fits, by the second dimension of the batch; else as `max_batch`."""
        return self.grown("sequence", memory).largest

    @property
    def bytes_held(self) -> int:
        """The bytes that have to fit: on a device those reserved by its caching allocator, else the peak."""
        return _held(self.profile)

    def __repr__(self) -> str:
        reserved = f", {format_bytes(self.reserved_bytes)} reserved" if self.reserved_bytes else ""
        return f"<Estimate of {format_bytes(self.peak_bytes)}{reserved} on {self.profile.device}>"

    def grown(self, what: str, memory: str | int) -> GrowthLimit:
        """How far the batch, or its sequences, can grow until the budget is full.

        Raises `UsageError` where the batch has no such length, and where other tensors of this process
        hold the budget already.
        """
        budget = parse_bytes(memory, whole=self.bytes_held)
        now, at = self._lengths(what)
        unused = self._unused
        if unused and budget <= unused:
            raise UsageError(_taken(budget, unused))
        refused = self._refused.setdefault(what, {})
        known = self._known.setdefault(what, {now: self.bytes_held})
        in_script = isinstance(self.workload, Script) and has_samples(self.profile, now)

        def peak_of(length: int) -> int | None:
            self._progress(f"{what} of {length}")
            try:
                other = at(length)
                trial = self._run(other)
            except (RuntimeError, ValueError, IndexError, ScriptFailed) as error:
                refused[length] = f"{type(error).__name__}: {str(error).splitlines()[0]}"
                known[length] = None
                return None
            assert trial.profile is not None
            if in_script and not has_samples(trial.profile, length):
                refused[length] = "no second step of the script has so many samples"
                known[length] = None
                return None
            known[length] = _held(trial.profile) - self.given_bytes(trial.profile, other)
            return known[length]

        found = largest_length(peak_of, budget, now, known)
        return GrowthLimit(
            what="batch" if what == "batch" else "sequence",
            budget_bytes=budget,
            now=now,
            largest=found.length,
            peak_bytes=found.peak,
            next_bytes=found.next_peak,
            limited_by=refused.get(found.length + 1, ""),
            tried=found.tried,
            falls=found.falls,
            unused_bytes=unused,
        )

    def at(self, what: str, length: int) -> tuple[Workload, dict[str, Any]]:
        """The workload at another length, to be run, and what its request has besides."""
        now, sized = self._lengths(what)
        given = sized(length) if length != now else self.workload
        if isinstance(given, _Sized):
            return given.script, {"batch_size": given.size}
        return given, {}

    def given_bytes(self, profile: Profile, other: Workload | _Sized) -> int:
        """What of the peak of another length is the batch that was given, which would not be there."""
        if profile.reserved_bytes or isinstance(other, (Script, _Sized)):
            return 0
        assert not isinstance(self.workload, Script)
        beside = max(unused_bytes(profile) - self._unused, 0)
        return min(beside, other.replaced_bytes(self.workload))

    def _lengths(self, what: str) -> tuple[int, Callable[[int], Workload | _Sized]]:
        """The length that there is, and the workload at another."""
        if isinstance(self.workload, Script):
            return self._lengths_of_script(self.workload, what)
        dimension = 0 if what == "batch" else 1
        now = _common_length(self.workload, dimension)
        if now is None:
            raise UsageError(
                f"the batch has no tensor with a {what} length (dimension {dimension}), so it cannot be "
                "made longer. Hand over a batch of tensors, samples first."
            )
        return now, lambda length: self._fresh().resized(dimension, now, length)

    def _fresh(self) -> Model:
        """The live workload; one that is sharded is made anew, since that cannot be undone."""
        if self._make is not None:
            return _built(self._make)[0]  # type: ignore[return-value]
        assert not isinstance(self.workload, Script)
        return self.workload

    def _lengths_of_script(
        self, script: Script, what: str
    ) -> tuple[int, Callable[[int], Workload | _Sized]]:
        now = self.trial.batch_size
        if what != "batch" or now is None:
            raise UsageError(
                f"a script's {what} length is not known: torchtrim can set the batch size of a "
                "torch.utils.data.DataLoader, and this script has none that batches. Give the length "
                "as an argument of the script and estimate it at two, or use torchtrim.estimate."
            )
        return now, lambda length: _Sized(script, length)

    def _run(self, given: Workload | _Sized) -> Trial:
        workload = given.script if isinstance(given, _Sized) else given
        size = given.size if isinstance(given, _Sized) else None
        live = not isinstance(workload, Script)
        request = msgspec.structs.replace(
            self._request, batch_size=size, device=self.device if live else None
        )
        with working_folder() as folder, self._emulating(live):
            trial = run_trial(workload, request, folder, self._progress)
        if trial.profile is None or not trial.profile.operators:
            raise Unsupported(
                "no operator was seen in the step, so there is nothing to estimate. Is the model a "
                "torch.nn.Module that computes on tensors?"
            )
        return trial

    def _emulating(self, live: bool) -> contextlib.AbstractContextManager[Any]:
        if not live or not is_emulated(self.device or ""):
            return contextlib.nullcontext()
        return emulate(model_named((self.device or "").partition(" ")[2]))


def estimate_report(
    script: Script,
    request: Request,
    *,
    fits: str | None = None,
    max_batch: str | None = None,
    grown: Callable[[Estimate], GrowthLimit] | None = None,
    progress: Progress = lambda _: None,
) -> Result:
    """The estimate of a script with its figures, and the largest batch of its loaders that fits.

    `grown`: what says how far, if not the estimate.
    """
    budget = parse_bytes(fits) if fits is not None else None
    if max_batch is not None:
        check_bytes(max_batch, share=True)
    found = Estimate(script, device=script.device, request=request, progress=progress)
    facts = found.facts
    if grown is not None:
        facts = msgspec.structs.replace(facts, growth=(grown(found),))
    elif max_batch is not None:
        facts = msgspec.structs.replace(facts, growth=(found.grown("batch", max_batch),))
    report = msgspec.structs.replace(
        report_of("estimate", script, found.trial),
        original=msgspec.structs.replace(
            figures_of(found.trial), step_seconds=0.0, spread_seconds=0.0, rss_bytes=None
        ),
        findings=memory_findings(found.profile),
        waiting=None,
        steps=0,
        budget_bytes=budget,
        memory_kind="reserved" if found.reserved_bytes else "allocated",
        estimated=facts,
    )
    return Result(report, found.profile)


def memory_findings(profile: Profile) -> tuple[Finding, ...]:
    """What of a profile's findings is about bytes: a dry run has no times."""
    found = priced(profile, find(profile))[0]
    return tuple(
        msgspec.structs.replace(one, price_ms=None) for one in found if one.code.startswith("TT2")
    )


class _Sized:
    """A script whose loaders give batches of another size."""

    def __init__(self, script: Script, size: int) -> None:
        self.script = script
        self.size = size


def _taken(budget: int, unused: int) -> str:
    """The error where other tensors hold the budget."""
    return (
        f"tensors of this process that the step does not use hold {format_bytes(unused)}, so nothing fits "
        f"in {format_bytes(budget)}: they are a part of every peak here. Let go of them first (another "
        "model, a data set, results of a notebook), estimate in a process of its own, or add them to the "
        "budget: they are `estimate(...).facts.unused_bytes`."
    )


def _held(profile: Profile) -> int:
    return profile.reserved_bytes or profile.peak_bytes


def _built(workload: Workload | Callable[[], Model]) -> tuple[Workload, tuple[str, ...]]:
    """The workload to estimate, and the assumptions made while it was built.

    A function is called dry, so that what it makes takes no memory.
    """
    if isinstance(workload, (Script, TrainStep, Inference)):
        return workload, ()
    if isinstance(workload, torch.nn.Module) or not callable(workload):
        raise UsageError(
            f"estimate takes a TrainStep, an Inference, a Script, or a function that makes one, and not "
            f"{type(workload).__name__}. For a model: torchtrim.Inference(model, inputs)."
        )
    with dry_run(str(Path.cwd()), owned_only=False) as dry:
        built = workload()
    if not isinstance(built, (TrainStep, Inference)):
        raise UsageError(
            f"the function gave {type(built).__name__}; it is to give a TrainStep or an Inference."
        )
    return built, dry.guesses.notes()


def _asked(request: Request) -> Request:
    """The request. Raises `UsageError` where it speaks of ranks that cannot be."""
    if request.ranks < 0:
        raise UsageError(f"{request.ranks} ranks: there is at least 1.")
    if request.sharding is not None and not request.ranks:
        raise UsageError(
            "a model is sharded over ranks: say how many, --ranks 8, or estimate(..., ranks=8)."
        )
    return request


def _maker(
    workload: Workload | Callable[[], Model], request: Request
) -> Callable[[], Model] | None:
    """The function that makes the workload, where it is wanted again.

    Raises `UsageError` for a live model that would be sharded.
    """
    if request.sharding is None or isinstance(workload, Script):
        return None
    if isinstance(workload, (TrainStep, Inference)):
        raise UsageError(
            "fully_shard changes a model for good, so the estimate makes one of its own: hand over a "
            "function, `estimate(lambda: TrainStep(...), ranks=8)`. Nothing in it takes memory."
        )
    return workload


def _checked(workload: Workload, device: str | None) -> str | None:
    """The device as a profile names it. Raises `UsageError` for one that cannot be estimate_of."""
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
            f"{others[kind]} of the model's tensors lie on {kind}, and an estimate is made of a model on "
            "the CPU, for any device. Hand over a function that makes it, "
            "`estimate(lambda: TrainStep(...))`: nothing in it takes memory; for a GPU add "
            'device="h100".'
        )
    if device in (None, "cpu"):
        return "cpu"
    return "emulated" if device == "emulated" else f"emulated {device}"


def _common_length(workload: Model, dimension: int) -> int | None:
    """The length that most of the batch's tensors have there."""
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
    """Stages x replicas x shards for a step of `batch` samples on so many devices, the quickest first.

    The workload runs dry once, with the few samples that it has; nothing is computed, and nothing is
    allocated for a function that makes it. Seconds are the device's at its full rates (`costs.devices`),
    so a real step takes longer: the order of layouts is what they are for. Raises `InfeasibleBudget`,
    `Unsupported`, `UsageError`.
    """
    if device not in DEVICES:
        raise UsageError(
            f"there is no device {device!r} to plan for; there are {', '.join(DEVICES)}."
        )
    if devices < 1 or batch < 1:
        raise UsageError(f"{batch} samples on {devices} devices: there is at least one of each.")
    budget = parse_bytes(memory)
    request = Request(steps=0, warmup=1, dry=True)
    found = Estimate(workload, device=device, request=request, progress=progress)
    times = estimate(found.profile, DEVICES[device]).device_seconds
    reader = ChainReader(found.profile, 0.0, times)
    progress("looking for stages, replicas and shards")
    chain_of = functools.lru_cache(maxsize=None)(reader.chain)
    return spread(chain_of, devices, batch, budget, order_of, fabric, layouts)
