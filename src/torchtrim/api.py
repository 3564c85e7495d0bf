"""The verbs, for Python, live models included. Each calls the loop that tells its story.

The command line finds all that it calls here too. Nothing is imported before it is wanted: what only reads
a file needs no torch.
"""

from __future__ import annotations

import importlib
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
    from torchtrim.analysis.user_source import Source as Source
    from torchtrim.capture.growth.records import measure_growth as measure_growth
    from torchtrim.capture.one_call import Device as Device
    from torchtrim.costs.devices import DEVICES as DEVICES
    from torchtrim.executor.apply import Applied
    from torchtrim.memory.packing import Packing as Packing
    from torchtrim.memory.packing import pack as pack
    from torchtrim.memory.packing import why_invalid as why_invalid
    from torchtrim.records.budget import MemoryKind
    from torchtrim.records.certificate import Certificate
    from torchtrim.records.estimate import Growth
    from torchtrim.records.finding import Equivalence, Finding
    from torchtrim.records.fix import Fixes
    from torchtrim.records.memory_table import MemoryTable
    from torchtrim.records.plan import Plan
    from torchtrim.records.profile import Profile
    from torchtrim.records.report import Result as Result
    from torchtrim.records.sharding import Sharding as Sharding
    from torchtrim.records.terms import Terms as Terms
    from torchtrim.records.trial import Request as Request
    from torchtrim.records.trial import Tunes as Tunes
    from torchtrim.report.changes import compare as compare
    from torchtrim.report.saving import SavingPicture
    from torchtrim.rules.registry import all_rules as all_rules
    from torchtrim.rules.registry import explain as explain
    from torchtrim.rules.registry import rule as rule
    from torchtrim.runner.planned_script import run_planned as run_planned
    from torchtrim.runner.process.warm import warm_up as warm_up
    from torchtrim.runner.ranks.launch import launch as launch
    from torchtrim.runner.script import Script as Script
    from torchtrim.runner.trials import Model, Workload
    from torchtrim.workflows.diagnose import diagnose_report as diagnose_report
    from torchtrim.workflows.estimate.estimate import Estimate as Estimate
    from torchtrim.workflows.estimate.estimate import estimate_report as estimate_report
    from torchtrim.workflows.export import perfetto_trace as perfetto_trace
    from torchtrim.workflows.find_batch import find_batch_report as find_batch_report
    from torchtrim.workflows.fix.report import fix_report as fix_report
    from torchtrim.workflows.fix.report import with_fixes as with_fixes
    from torchtrim.workflows.lint import Checked as Checked
    from torchtrim.workflows.lint import lint_report as lint_report
    from torchtrim.workflows.live_model.applied import Fitted as Fitted
    from torchtrim.workflows.live_model.applied import FittedMemory as FittedMemory
    from torchtrim.workflows.made_for import check_script as check_script
    from torchtrim.workflows.optimize.report import export_report as export_report
    from torchtrim.workflows.optimize.report import optimize_report as optimize_report
    from torchtrim.workflows.optimize.report import plan_report as plan_report
    from torchtrim.workflows.pipeline import plan_pipeline as plan_pipeline
    from torchtrim.workflows.serve import optimize_calls_instead as optimize_calls_instead
    from torchtrim.workflows.serve import optimize_calls_report as optimize_calls_report
    from torchtrim.workflows.stream.stream import StreamRequest as StreamRequest
    from torchtrim.workflows.stream.stream import check_report as check_report
    from torchtrim.workflows.stream.stream import compared_report as compared_report
    from torchtrim.workflows.trace import diagnose_traces as diagnose_traces
    from torchtrim.workflows.tune_loader import tune_loader_report as tune_loader_report
    from torchtrim.workflows.undo import Watch as Watch
    from torchtrim.workflows.undo import settle as settle
    from torchtrim.workflows.undo import undo as undo
    from torchtrim.workflows.verify.live import run_checked as run_checked
    from torchtrim.workflows.verify.verify import check_certificate as check_certificate
    from torchtrim.workflows.verify.verify import verify_pair as verify_pair
    from torchtrim.workflows.verify.verify import verify_report as verify_report

_HOMES = {
    "torchtrim.workflows.live_model.applied": ("Fitted", "FittedMemory"),
    "torchtrim.workflows.diagnose": ("diagnose_report",),
    "torchtrim.workflows.estimate.estimate": ("Estimate", "estimate_report"),
    "torchtrim.workflows.export": ("perfetto_trace",),
    "torchtrim.workflows.find_batch": ("find_batch_report",),
    "torchtrim.workflows.fix.report": ("fix_report", "with_fixes"),
    "torchtrim.workflows.verify.live": ("run_checked",),
    "torchtrim.workflows.lint": ("Checked", "lint_report"),
    "torchtrim.workflows.made_for": ("check_script",),
    "torchtrim.workflows.optimize.report": ("export_report", "optimize_report", "plan_report"),
    "torchtrim.workflows.pipeline": ("plan_pipeline",),
    "torchtrim.workflows.serve": ("optimize_calls_instead", "optimize_calls_report"),
    "torchtrim.workflows.stream.stream": ("StreamRequest", "check_report", "compared_report"),
    "torchtrim.workflows.tune_loader": ("tune_loader_report",),
    "torchtrim.workflows.undo": ("Watch", "settle", "undo"),
    "torchtrim.workflows.verify.verify": ("check_certificate", "verify_report", "verify_pair"),
    "torchtrim.memory.packing": ("Packing", "pack", "why_invalid"),
    "torchtrim.memory.packing.table": ("read_buffers", "write_offsets"),
    "torchtrim.analysis.peak": ("holders",),
    "torchtrim.capture.growth.records": ("measure_growth",),
    "torchtrim.capture.one_call": ("Device",),
    "torchtrim.workflows.trace": ("diagnose_traces",),
    "torchtrim.capture.versions": ("untested_torch",),
    "torchtrim.records.report": ("Result",),
    "torchtrim.records.sharding": ("Sharding",),
    "torchtrim.records.terms": ("Terms",),
    "torchtrim.records.trial": ("Request", "Tunes"),
    "torchtrim.report.changes": ("compare",),
    "torchtrim.analysis.allow_list": ("Site", "hold", "near", "sites", "updated"),
    "torchtrim.rules.registry": ("all_rules", "explain", "rule"),
    "torchtrim.analysis.user_source": ("Source",),
    "torchtrim.runner.ranks.launch": ("launch",),
    "torchtrim.runner.planned_script": ("run_planned",),
    "torchtrim.runner.script": ("Script",),
    "torchtrim.runner.process.warm": ("warm_up",),
    "torchtrim.costs.devices": ("DEVICES",),
    "torchtrim.executor.registry": ("technique_names", "technique_page"),
}
_HOME = {name: home for home, names in _HOMES.items() for name in names}
_THERE = {
    "read_buffers": "read",
    "write_offsets": "write",
    "technique_names": "names",
    "untested_torch": "untested",
    "technique_page": "page",
}

Progress = Callable[[str], None]
Mode = Literal["inference", "training"]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME[name]), _THERE.get(name, name))


def _silent(_: str) -> None: ...


def record(workload: Workload, *, warmup: int = 1, progress: Progress = _silent) -> Profile:
    """Record one step. Raises `ScriptFailed` if there was none."""
    from torchtrim.workflows import diagnose

    return diagnose.record(workload, warmup, progress)


def diagnose(
    workload: Workload, *, select: Sequence[str] | None = None, progress: Progress = _silent
) -> tuple[Finding, ...]:
    """What is wasteful in a step, most expensive first."""
    from torchtrim.workflows.diagnose import findings_of

    return findings_of(workload, select, progress)


class Measured(NamedTuple):
    """What a call waited for and needed. `waits`: path, line, what, row of the table of waits, count."""

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

    It runs on the GPU where there is one; elsewhere a GPU is emulated, on which it computes the same.
    `warmup`: calls before, which are not measured. `project`: the folder of your own source, by
    default the current one.
    """
    from torchtrim.analysis.syncs import waits_in
    from torchtrim.capture.one_call import record_call

    profile = record_call(function, warmup=warmup, device=device, project=project)
    return Measured(waits_in(profile), profile.peak_bytes, profile)


def growing_state(profile: Profile) -> Iterator[Finding]:
    """What grows in a stream whose growth was measured."""
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
    """A plan for a peak of `memory` (`"8GiB"`, `"60%"`, bytes), not yet tried.

    `allow="ROUNDING"`: another order of sums; `"semantic=precision"`: another function, by that technique.
    `pins`: patterns of places by what holds there, as `{"keep": ["*.attn"]}`. Raises `InfeasibleBudget`.
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
    """Plan, measure, correct and verify; then leave the plan applied to the live model.

    `allow` and `pins` are those of `plan`. `candidates`: how many plans are run, of which the quickest is
    taken. Raises `InfeasibleBudget`, and `ApplyFailed` if the planned step does not equal the original.
    """
    from torchtrim.records.budget import memory_limit
    from torchtrim.records.terms import Terms
    from torchtrim.records.trial import Request
    from torchtrim.workflows.live_model.applied import Fitted
    from torchtrim.workflows.optimize.fitting import Fitting
    from torchtrim.workflows.optimize.report import fit_model

    limit = memory_limit(memory, memory_kind)
    terms = Terms(allow, pins=pins or {}, candidates=candidates)
    fitting = Fitting(workload, Request(steps=steps), progress, terms)
    return Fitted(*fit_model(fitting, limit))


def apply(plan: Plan, *roots: torch.nn.Module | torch.optim.Optimizer) -> Applied:
    """Apply a plan to live roots and optimizers. Raises `ApplyFailed` if it was made for others."""
    from torchtrim.executor.apply import apply_to_its_own

    return apply_to_its_own(plan, roots)


def verify(
    workload: Workload, plan: Plan | Workload, *, steps: int = 3, progress: Progress = _silent
) -> Certificate:
    """Whether the planned workload, or another one, equals the original.

    Two scripts, two `TrainStep`s or two `Inference`s may be compared, for any change a person makes. For
    those in one process, make both models from the same seed.
    """
    from torchtrim.records.plan import Plan
    from torchtrim.records.trial import Request
    from torchtrim.workflows.verify.verify import verify_pair, verify_report

    request = Request(steps=steps)
    if isinstance(plan, Plan):
        found = verify_report(workload, plan, request, progress=progress)
    else:
        found = verify_pair(workload, plan, request, progress=progress)
    assert found.report.certificate is not None
    return found.report.certificate


def assert_same(
    one: Workload,
    other: Workload,
    *,
    steps: int = 3,
    allow: Equivalence = "BITWISE",
) -> Certificate:
    """For tests: raise `AssertionError`, with the first difference, unless both compute the same.

    `allow="ROUNDING"`: sums may be added up in another order.
    """
    from torchtrim.report.facts import certificate_lines, difference_of

    certificate = verify(one, other, steps=steps)
    if certificate.verdict not in ("BITWISE", allow):
        first = difference_of(certificate)
        said = [*certificate_lines(certificate), *([f"first difference: {first}"] if first else [])]
        raise AssertionError("\n".join(said))
    return certificate


def estimate(
    workload: Workload | Callable[[], Model],
    *,
    device: str | None = None,
    ranks: int = 0,
    fsdp: bool | Sharding = False,
    progress: Progress = _silent,
) -> Estimate:
    """What a step would need, without running it: nothing is computed, and nothing takes memory.

    `workload` may be a function that makes one; then what it makes takes no memory either, so that a
    model can be estimated that does not fit here. `device`: `"cpu"`, by default; the name of a GPU to
    estimate for, such as `"h100"`; or `"emulated"` for any. `ranks`: of how many processes this is to be the
    first, and the one whose memory is reported; no other is started. `fsdp`: its model is sharded over them
    with `fully_shard`; a `Sharding` says how. `workload` then is a function or a script.

    Raises `UsageError` for what is no workload, and `Unsupported` for an operator of which nobody knows what
    it gives and for a model that `fully_shard` refuses.
    """
    from torchtrim.records.sharding import Sharding
    from torchtrim.records.trial import Request
    from torchtrim.workflows.estimate.estimate import Estimate

    sharding = fsdp if isinstance(fsdp, Sharding) else Sharding() if fsdp else None
    request = Request(steps=0, dry=True, ranks=ranks, sharding=sharding)
    return Estimate(workload, device=device, request=request, progress=progress)


def find_batch(
    workload: Workload | Callable[[], Model],
    memory: str | int,
    *,
    probes: int = 4,
    progress: Progress = _silent,
) -> Growth:
    """The largest batch that fits in that memory: predicted without running it, and then run.

    `largest` was run and fitted, 0 where a batch of 1 does not; `exact` says that one more was run, and does
    not fit. At most `probes` steps are run, and the model is then as it was. A script's is the batch of its
    loaders. Raises `UsageError` where the batch has no samples that could be more.
    """
    from torchtrim.workflows.find_batch import find_batch

    return find_batch(workload, memory, probes=probes, progress=progress)


def fix_source(
    script: Script, *, unsafe: bool = False, write: bool = False, progress: Progress = _silent
) -> Fixes:
    """Fix the host-device syncs in a script's own source, and prove each fix. With `write`, in the files."""
    from torchtrim.records.trial import Request
    from torchtrim.workflows.fix.report import fix_report

    result = fix_report(script, Request(), unsafe=unsafe, write=write, progress=progress)
    assert result.report.fixes is not None
    return result.report.fixes


def count_memory(model: torch.nn.Module, inputs: Any, mode: Mode = "inference") -> MemoryTable:
    """Bytes of a model and of one call of it without gradients, each storage once.

    `inputs`: a tensor, a tuple of arguments, or a dict of named ones. `mode="training"`: of one forward and
    backward, at its peak. Nothing is computed, except for a model whose control flow depends on values.
    """
    if _checked(mode) == "training":
        from torchtrim.workflows.live_model.training import table_of_training

        return table_of_training(model, inputs)
    from torchtrim.workflows.live_model.network import table_of_calls

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
    """Make a live model's calls, or its training, need less memory, and prove that they compute the same.

    `inputs`: a tensor, a tuple of arguments, or a dict of named ones; the plan for others is made when
    they come. `inplace`: operators overwrite what no one looks at again. `verify=False` runs nothing.

    Inference: `reuse_buffers`: results lie in one arena. `remove_grad_params`: gradients go to disk until it
    is reverted. `split_batch`: in how many parts of the batch the first layers run. While it is applied,
    calls in eval mode run without gradients; in training mode, or where an input wants gradients, the
    original runs.

    Training: what forward saves is computed again in backward, as much of it as `memory` (`"60%"`, bytes)
    demands, or all that lowers the peak; the other options have no say, since autograd reuses memory itself.
    For a step with a loss and an optimizer take `torchtrim.fit`.

    Raises `UsageError`, `InfeasibleBudget`, and `ApplyFailed` where it would not compute the same; the model
    then is as it was.
    """
    from torchtrim.workflows.live_model.applied import FittedMemory

    if _checked(mode) == "training":
        from torchtrim.workflows.live_model import training

        optimized = training.optimize_step(
            model,
            inputs,
            memory,
            inplace=inplace,
            split_batch=split_batch,
            verify=verify,
            progress=progress,
        )
        return FittedMemory(optimized)
    from torchtrim.planner.calls import CallOptions
    from torchtrim.workflows.live_model import network

    options = CallOptions(inplace, reuse_buffers, remove_grad_params, split_batch)
    found = network.optimize(model, inputs, memory, options, verify=verify, progress=progress)
    return FittedMemory(found)


def saving_by_batch(
    model: torch.nn.Module, inputs: Any, batches: Sequence[int] = (1, 4, 16, 64, 128)
) -> SavingPicture:
    """What `optimize_memory` would save of a call, by the size of the batch. Nothing is computed."""
    from torchtrim.report.saving import SavingPicture
    from torchtrim.workflows.live_model.network import savings_by_batch

    return SavingPicture(type(model).__name__, savings_by_batch(model, inputs, batches))


def _checked(mode: str) -> str:
    if mode not in ("inference", "training"):
        from torchtrim.errors import UsageError

        raise UsageError(f"mode={mode!r}: it is 'inference' or 'training'.")
    return mode
