"""The verbs as Python functions, for live models too. Each calls one workflow.

The command line uses this module as well. Imports are lazy: functions that only read files need no torch.
"""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

if TYPE_CHECKING:
    import torch

    from torchtrim.analysis.allow_list import Site as Site
    from torchtrim.analysis.allow_list import hold as hold
    from torchtrim.analysis.allow_list import near as near
    from torchtrim.analysis.allow_list import sites as sites
    from torchtrim.analysis.allow_list import updated as updated
    from torchtrim.analysis.peak import holders as holders
    from torchtrim.analysis.user_source import SourceLines as SourceLines
    from torchtrim.capture.growth.records import measure_growth as measure_growth
    from torchtrim.capture.recording import Device as Device
    from torchtrim.compiled.inductor import probe_compiled as probe_compiled
    from torchtrim.costs.devices import DEVICES as DEVICES
    from torchtrim.executor.registry import Handles
    from torchtrim.memory.packing import Packing as Packing
    from torchtrim.memory.packing import pack as pack
    from torchtrim.memory.packing import why_invalid as why_invalid
    from torchtrim.records.budget import MemoryKind
    from torchtrim.records.certificate import Certificate
    from torchtrim.records.estimate import GrowthLimit, MemoryTable
    from torchtrim.records.finding import Equivalence, Finding
    from torchtrim.records.fix import Fixes
    from torchtrim.records.plan import Plan
    from torchtrim.records.profile import Profile
    from torchtrim.records.report import Result as Result
    from torchtrim.records.sharding import Sharding as Sharding
    from torchtrim.records.terms import Terms as Terms
    from torchtrim.records.trial import Request as Request
    from torchtrim.records.trial import TuningRequest as TuningRequest
    from torchtrim.report.changes import compare as compare
    from torchtrim.rules.registry import all_rules as all_rules
    from torchtrim.rules.registry import explain as explain
    from torchtrim.rules.registry import rule as rule
    from torchtrim.runner.planned_script import check_script as check_script
    from torchtrim.runner.planned_script import run_planned as run_planned
    from torchtrim.runner.ranks import launch as launch
    from torchtrim.runner.run_report import RunReport as RunReport
    from torchtrim.runner.script import Script as Script
    from torchtrim.runner.trials import Model, Workload
    from torchtrim.runner.warm import warm_up as warm_up
    from torchtrim.workflows.battery import battery as battery
    from torchtrim.workflows.battery import battery_lines as battery_lines
    from torchtrim.workflows.diagnose import diagnose_report as diagnose_report
    from torchtrim.workflows.estimate import Estimate as Estimate
    from torchtrim.workflows.estimate import estimate_report as estimate_report
    from torchtrim.workflows.find_batch import find_batch_report as find_batch_report
    from torchtrim.workflows.fix import fix_report as fix_report
    from torchtrim.workflows.fix import with_fixes as with_fixes
    from torchtrim.workflows.in_training import InTraining as InTraining
    from torchtrim.workflows.in_training import Trainer as Trainer
    from torchtrim.workflows.lint import Checked as Checked
    from torchtrim.workflows.lint import Watch as Watch
    from torchtrim.workflows.lint import lint_report as lint_report
    from torchtrim.workflows.lint import settle as settle
    from torchtrim.workflows.lint import undo as undo
    from torchtrim.workflows.live_model import Fitted as Fitted
    from torchtrim.workflows.live_model import FittedMemory as FittedMemory
    from torchtrim.workflows.optimize.report import export_report as export_report
    from torchtrim.workflows.optimize.report import optimize_report as optimize_report
    from torchtrim.workflows.optimize.report import plan_report as plan_report
    from torchtrim.workflows.pipeline import plan_pipeline as plan_pipeline
    from torchtrim.workflows.serve import optimize_calls_instead as optimize_calls_instead
    from torchtrim.workflows.serve import optimize_calls_report as optimize_calls_report
    from torchtrim.workflows.snapshot import snapshot_report as snapshot_report
    from torchtrim.workflows.stream import StreamRequest as StreamRequest
    from torchtrim.workflows.stream import check_report as check_report
    from torchtrim.workflows.stream import compared_report as compared_report
    from torchtrim.workflows.trace import diagnose_traces as diagnose_traces
    from torchtrim.workflows.trace import perfetto_trace as perfetto_trace
    from torchtrim.workflows.tune_loader import tune_loader_report as tune_loader_report
    from torchtrim.workflows.verify import check_certificate as check_certificate
    from torchtrim.workflows.verify import run_checked as run_checked
    from torchtrim.workflows.verify import verify_pair as verify_pair
    from torchtrim.workflows.verify import verify_report as verify_report

_HOMES = {
    "torchtrim.workflows.battery": ("battery", "battery_lines"),
    "torchtrim.workflows.live_model": ("Fitted", "FittedMemory"),
    "torchtrim.workflows.diagnose": ("diagnose_report",),
    "torchtrim.workflows.estimate": ("Estimate", "estimate_report"),
    "torchtrim.workflows.trace": ("perfetto_trace", "diagnose_traces"),
    "torchtrim.workflows.find_batch": ("find_batch_report",),
    "torchtrim.workflows.fix": ("fix_report", "with_fixes"),
    "torchtrim.workflows.verify": (
        "run_checked",
        "check_certificate",
        "verify_report",
        "verify_pair",
    ),
    "torchtrim.workflows.in_training": ("InTraining", "Trainer"),
    "torchtrim.workflows.lint": ("Checked", "lint_report", "Watch", "settle", "undo"),
    "torchtrim.runner.planned_script": ("check_script", "run_planned"),
    "torchtrim.workflows.optimize.report": ("export_report", "optimize_report", "plan_report"),
    "torchtrim.workflows.pipeline": ("plan_pipeline",),
    "torchtrim.workflows.serve": ("optimize_calls_instead", "optimize_calls_report"),
    "torchtrim.workflows.snapshot": ("snapshot_report",),
    "torchtrim.workflows.stream": ("StreamRequest", "check_report", "compared_report"),
    "torchtrim.workflows.tune_loader": ("tune_loader_report",),
    "torchtrim.memory.packing": ("Packing", "pack", "why_invalid"),
    "torchtrim.memory.packing.table": ("read_buffers", "write_offsets"),
    "torchtrim.analysis.peak": ("holders",),
    "torchtrim.capture.growth.records": ("measure_growth",),
    "torchtrim.capture.recording": ("Device",),
    "torchtrim.capture.build": ("untested_torch",),
    "torchtrim.compiled.inductor": ("probe_compiled",),
    "torchtrim.records.report": ("Result",),
    "torchtrim.records.sharding": ("Sharding",),
    "torchtrim.records.terms": ("Terms",),
    "torchtrim.records.trial": ("Request", "TuningRequest"),
    "torchtrim.report.changes": ("compare",),
    "torchtrim.analysis.allow_list": ("Site", "hold", "near", "sites", "updated"),
    "torchtrim.rules.registry": ("all_rules", "explain", "rule"),
    "torchtrim.analysis.user_source": ("SourceLines",),
    "torchtrim.runner.ranks": ("launch",),
    "torchtrim.runner.run_report": ("RunReport",),
    "torchtrim.runner.script": ("Script",),
    "torchtrim.runner.warm": ("warm_up",),
    "torchtrim.costs.devices": ("DEVICES",),
    "torchtrim.executor.registry": ("technique_names", "technique_page"),
}
_HOME = {name: home for home, names in _HOMES.items() for name in names}
_NAMED_THERE = {
    "read_buffers": "read",
    "write_offsets": "write",
    "technique_names": "names",
    "untested_torch": "untested",
    "technique_page": "page",
}

_RENAMED = {"Source": "SourceLines", "Tunes": "TuningRequest"}
"""Old names, which still work in this version, with a `DeprecationWarning`."""

Progress = Callable[[str], None]
Mode = Literal["inference", "training"]


def __getattr__(name: str) -> Any:
    if new := _RENAMED.get(name):
        message = f"torchtrim.api.{name} was renamed: use torchtrim.api.{new}"
        warnings.warn(message, DeprecationWarning, stacklevel=2)
        name = new
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME[name]), _NAMED_THERE.get(name, name))


def _silent(_: str) -> None: ...


def record(workload: Workload, *, warmup: int = 1, progress: Progress = _silent) -> Profile:
    """Record one step of a workload. Raises `ScriptFailed` if it runs no step."""
    from torchtrim.workflows import diagnose

    return diagnose.record(workload, warmup, progress)


def diagnose(
    workload: Workload, *, select: Sequence[str] | None = None, progress: Progress = _silent
) -> tuple[Finding, ...]:
    """Return what wastes time or memory in a step, most expensive first."""
    from torchtrim.workflows.diagnose import findings_of

    return findings_of(workload, select, progress)


class Measured(NamedTuple):
    """The syncs and the memory of one call. `waits`: path, line, operator, row of the sync table, count."""

    waits: tuple[tuple[str, int, str, str, int], ...]
    peak_bytes: int
    profile: Profile


def measure(
    function: Callable[[], object],
    *,
    warmup: int = 0,
    device: Device | None = None,
    project: str | Path | None = None,
) -> Measured:
    """Call a function and measure its host-device syncs and its memory.

    Runs on the GPU if there is one, otherwise on an emulated GPU, which computes the same results. `warmup`:
    unmeasured calls before the measured one. `project`: the folder of your own source (default: the current
    one).
    """
    from torchtrim.analysis.syncs import waits_in
    from torchtrim.capture.recording import record_call

    profile = record_call(function, warmup=warmup, device=device, project=project)
    return Measured(waits_in(profile), profile.peak_bytes, profile)


def growing_state(profile: Profile) -> Iterator[Finding]:
    """Yield the findings on state that grows from frame to frame in a profiled stream."""
    from torchtrim.core.isolation import isolated
    from torchtrim.rules.tt501_growing_state import check

    with isolated("rule", "TT501"):
        yield from check(profile)


def plan(
    workload: Workload,
    memory: str | int,
    *,
    allow: str = "BITWISE",
    pins: Mapping[str, Sequence[str]] | None = None,
    progress: Progress = _silent,
) -> Plan:
    """Make a plan for a peak of `memory` (`"8GiB"`, `"60%"` or a number of bytes), without trying it.

    `allow="ROUNDING"` permits another order of additions; `"semantic=precision"` permits that technique to
    change the function. `pins` maps a pin to patterns of module paths, such as `{"keep": ["*.attn"]}`. Raises
    `InfeasibleBudget`.
    """
    from torchtrim.records.terms import Terms
    from torchtrim.records.trial import Request
    from torchtrim.workflows.optimize.report import plan_report

    terms = Terms(allow, pins=pins or {})
    chosen = plan_report(workload, memory, Request(), terms=terms, progress=progress).plan
    assert chosen is not None
    return chosen


def fit(
    workload: Model,
    memory: str | int,
    *,
    steps: int = 3,
    memory_kind: MemoryKind = "allocated",
    allow: str = "BITWISE",
    pins: Mapping[str, Sequence[str]] | None = None,
    candidates: int = 1,
    progress: Progress = _silent,
) -> Fitted:
    """Plan, measure, correct and verify, then leave the plan applied to the live model.

    `allow` and `pins` work as in `plan`. `candidates`: how many plans to run; the fastest is kept. Raises
    `InfeasibleBudget`, and `ApplyFailed` if the planned step does not equal the original.
    """
    from torchtrim.errors import UsageError
    from torchtrim.records.budget import memory_limit
    from torchtrim.records.terms import Terms
    from torchtrim.records.trial import Request
    from torchtrim.workflows.live_model import Fitted
    from torchtrim.workflows.optimize.fitting import Fitting
    from torchtrim.workflows.optimize.report import fit_model

    if not hasattr(workload, "model"):
        raise UsageError(
            f"fit expects a torchtrim.TrainStep, not {type(workload).__name__}. For a function of one step: "
            "torchtrim.TrainStep(model, loss_of, optimizer, *batch)."
        )
    limit = memory_limit(memory, memory_kind)
    terms = Terms(allow, pins=pins or {}, candidates=candidates)
    fitting = Fitting(workload, Request(steps=steps), progress, terms)
    return Fitted(*fit_model(fitting, limit))


def apply(plan: Plan, *roots: torch.nn.Module | torch.optim.Optimizer) -> Handles:
    """Apply a plan to live modules and optimizers. Raises `ApplyFailed` if it was made for others."""
    from torchtrim.executor.apply import apply_to_its_own

    return apply_to_its_own(plan, roots)


def verify(
    workload: Workload, plan: Plan | Workload, *, steps: int = 3, progress: Progress = _silent
) -> Certificate:
    """Certify that the planned workload, or a second workload, equals the original.

    `plan` may also be a second script, `TrainStep` or `Inference`, to check any change that a person made.
    Build two live models from the same seed.
    """
    from torchtrim.records.plan import Plan
    from torchtrim.records.trial import Request
    from torchtrim.workflows.verify import verify_pair, verify_report

    request = Request(steps=steps)
    if isinstance(plan, Plan):
        certificate = verify_report(workload, plan, request, progress=progress).report.certificate
    else:
        certificate = verify_pair(workload, plan, request, progress=progress).report.certificate
    assert certificate is not None
    return certificate


def assert_same(
    one: Workload,
    other: Workload,
    *,
    steps: int = 3,
    allow: Equivalence = "BITWISE",
) -> Certificate:
    """Raise `AssertionError` with the first difference unless both workloads compute the same. For tests.

    `allow="ROUNDING"` accepts another order of additions.
    """
    from torchtrim.report.facts import certificate_lines, difference_of

    certificate = verify(one, other, steps=steps)
    if certificate.verdict not in ("BITWISE", allow):
        first = difference_of(certificate)
        lines = certificate_lines(certificate) + [f"first difference: {first}"] * bool(first)
        raise AssertionError("\n".join(lines))
    return certificate


def estimate(
    workload: Workload | Callable[[], Model],
    *,
    device: str | None = None,
    ranks: int = 0,
    fsdp: bool | Sharding = False,
    memory_kind: MemoryKind = "allocated",
    progress: Progress = _silent,
) -> Estimate:
    """Predict what a step needs without running it: no operator computes, and no memory is allocated.

    `workload` may be a function that makes the workload. Its model then takes no memory either, so you can
    estimate a model that does not fit on this machine. `device`: `"cpu"` (default), the name of a GPU such as
    `"h100"`, or `"emulated"` for any GPU. `ranks`: estimate rank 0 of this many processes, without starting
    the others. `fsdp`: shard the model over those ranks with `fully_shard`; pass a `Sharding` to say how.
    With `fsdp`, `workload` must be a function or a script. `memory_kind`: what budgets limit, and what
    percentages are of: `"allocated"` bytes, or on a device those that its caching allocator has `"reserved"`.

    Raises `UsageError` if `workload` is not a workload, and `Unsupported` for an operator whose output shape
    is unknown or a model that `fully_shard` rejects.
    """
    from torchtrim.records.sharding import Sharding
    from torchtrim.records.trial import Request
    from torchtrim.workflows.estimate import Estimate

    sharding = fsdp if isinstance(fsdp, Sharding) else Sharding() if fsdp else None
    request = Request(steps=0, dry=True, ranks=ranks, sharding=sharding)
    return Estimate(
        workload, device=device, request=request, memory_kind=memory_kind, progress=progress
    )


def find_batch(
    workload: Workload | Callable[[], Model],
    memory: str | int,
    *,
    memory_kind: MemoryKind = "allocated",
    probes: int = 4,
    progress: Progress = _silent,
) -> GrowthLimit:
    """Find the largest batch that fits into `memory`: predict it, then run it.

    `largest` is the largest batch that ran and fitted (0 if a batch of 1 does not fit). `exact` is true if
    one sample more was run and did not fit. Runs at most `probes` steps and leaves the model unchanged. For a
    script, the batch is that of its data loaders. `memory_kind`: see `estimate`. Raises `UsageError` if no
    input has a batch dimension that can grow.
    """
    from torchtrim.workflows.find_batch import find_batch

    return find_batch(workload, memory, memory_kind=memory_kind, probes=probes, progress=progress)


def fix_source(
    script: Script, *, unsafe: bool = False, write: bool = False, progress: Progress = _silent
) -> Fixes:
    """Fix the host-device syncs in a script's own source and prove each fix. `write`: edit the files."""
    from torchtrim.records.trial import Request
    from torchtrim.workflows.fix import fix_report

    result = fix_report(script, Request(), unsafe=unsafe, write=write, progress=progress)
    assert result.report.fixes is not None
    return result.report.fixes


def count_memory(model: torch.nn.Module, inputs: Any, mode: Mode = "inference") -> MemoryTable:
    """Return the bytes of a model and of one call of it without gradients; each storage counts once.

    `inputs`: a tensor, a tuple of arguments, or a dict of keyword arguments. `mode="training"`: the peak of
    one forward and backward. Computes nothing unless the model's control flow depends on values.
    """
    if _checked(mode) == "training":
        from torchtrim.workflows.live_model import table_of_training

        return table_of_training(model, inputs)
    from torchtrim.workflows.live_model import table_of_calls

    return table_of_calls(model, inputs)


def optimize_memory(
    model: torch.nn.Module,
    inputs: Any,
    mode: Mode = "inference",
    *,
    inplace: bool = True,
    reuse_buffers: bool = True,
    remove_grad_params: bool = True,
    split_batch: int = 1,
    memory: str | int | None = None,
    verify: bool = True,
    progress: Progress = _silent,
) -> FittedMemory:
    """Reduce the memory of a live model's calls, or of its training, and prove that the results are equal.

    `inputs`: a tensor, a tuple of arguments, or a dict of keyword arguments. Inputs of other shapes are
    planned when they first come. `inplace`: operators overwrite inputs that nothing reads afterwards.
    `verify=False` runs nothing.

    Inference: `reuse_buffers` places results in one arena. `remove_grad_params` moves gradients to disk until
    the plan is reverted. `split_batch`: the number of parts into which the first layers split the batch.
    While the plan is applied, calls in eval mode run without gradients; the original runs in training mode or
    if an input requires gradients.

    Training: backward recomputes saved tensors, as many as `memory` (`"60%"`, bytes) demands, or all that
    lower the peak. The other options have no effect, since autograd reuses memory itself. Use `torchtrim.fit`
    for a step with a loss and an optimizer.

    Raises `UsageError`, `InfeasibleBudget`, and `ApplyFailed` if the results would differ. The model is then
    unchanged.
    """
    from torchtrim.workflows.live_model import FittedMemory

    if _checked(mode) == "training":
        from torchtrim.workflows.live_model import optimize_step

        optimized = optimize_step(
            model,
            inputs,
            memory,
            inplace=inplace,
            split_batch=split_batch,
            verify=verify,
            progress=progress,
        )
        return FittedMemory(optimized)
    from torchtrim.planner.plans import CallOptions
    from torchtrim.workflows.live_model import optimize_calls

    options = CallOptions(inplace, reuse_buffers, remove_grad_params, split_batch)
    found = optimize_calls(model, inputs, memory, options, verify=verify, progress=progress)
    return FittedMemory(found)


def _checked(mode: str) -> str:
    if mode not in ("inference", "training"):
        from torchtrim.errors import UsageError

        raise UsageError(f"mode={mode!r}: expected 'inference' or 'training'.")
    return mode
