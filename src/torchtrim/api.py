"""The verbs, for Python. The command line calls these and renders what they return."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import NamedTuple

import msgspec
import torch

from torchtrim import __version__
from torchtrim.certify.calls import fit_calls, is_of_calls
from torchtrim.certify.cured import cures_of, with_cures
from torchtrim.certify.estimate import Estimate, memory_findings
from torchtrim.certify.fit import Fit, Fitting, measured
from torchtrim.certify.fixing import Fixing
from torchtrim.certify.runs import Workload, run_trial
from torchtrim.certify.settings import with_settings
from torchtrim.certify.trial import Request, Trial
from torchtrim.certify.verify import Contest, certify
from torchtrim.errors import ApplyFailed, InfeasibleBudget, UsageError
from torchtrim.memory.peak import holders
from torchtrim.observe.one_call import Device, record_call
from torchtrim.observe.script import Script, working_folder
from torchtrim.observe.workload import Inference, TrainStep
from torchtrim.records.certificate import Certificate
from torchtrim.records.finding import Finding
from torchtrim.records.fix import Cures
from torchtrim.records.plan import MemoryKind, Plan
from torchtrim.records.profile import Profile
from torchtrim.records.report import Figures, FrontierPoint, PlanSummary, Report
from torchtrim.rewrite.files import write_sources
from torchtrim.rules.prices import priced
from torchtrim.rules.registry import diagnose as find
from torchtrim.rules.waits import waits_in
from torchtrim.techniques.apply import Applied, apply_plan
from torchtrim.techniques.fingerprint import fingerprint_of, sha256_of
from torchtrim.units import parse_bytes

Progress = Callable[[str], None]
Model = TrainStep | Inference


class Result(NamedTuple):
    """What a verb gives: the report, and what was too large for it."""

    report: Report
    before: Profile | None = None
    after: Profile | None = None
    plan: Plan | None = None


class Fitted:
    """A live model that was fitted into a budget. As a context manager it is reverted at the end."""

    def __init__(self, fit: Fit, applied: Applied) -> None:
        self.original: Figures | None = fit.original.figures()
        self.planned = fit.planned.figures() if fit.planned else None
        self.plan = fit.plan
        self.certificate = fit.certificate
        self._applied = applied

    def revert(self) -> None:
        """Make the model what it was."""
        self._applied.revert()

    def __enter__(self) -> Fitted:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.revert()


def _silent(_: str) -> None: ...


def record(workload: Workload, *, warmup: int = 1, progress: Progress = _silent) -> Profile:
    """Record one step. Raises `ScriptFailed` if there was none."""
    fitting = Fitting(workload, Request(steps=0, warmup=warmup), progress)
    return fitting.planner(fitting.observe()).profile


def diagnose(
    workload: Workload, *, select: Sequence[str] | None = None, progress: Progress = _silent
) -> tuple[Finding, ...]:
    """What is wasteful in a step, dearest first."""
    profile = record(workload, progress=progress)
    return with_settings(priced(profile, find(profile, select))[0], profile.project)


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
    """Call a function and see what it waits for and needs.

    It runs on the GPU where there is one; elsewhere a GPU is emulated, on which it computes the same.
    `warmup`: calls before, which are not measured. `project`: the folder of the user's own source, by
    default the current one.
    """
    profile = record_call(function, warmup=warmup, device=device, project=project)
    return Measured(waits_in(profile), profile.peak_bytes, profile)


def plan(workload: Workload, memory: str | int, *, progress: Progress = _silent) -> Plan:
    """A plan for a peak of `memory` (`"8GiB"`, `"60%"`, bytes), not yet tried.

    Raises `InfeasibleBudget`.
    """
    chosen = plan_report(workload, memory, Request(), progress=progress).plan
    assert chosen is not None
    return chosen


def fit(
    workload: Model,
    memory: str | int,
    *,
    steps: int = 3,
    memory_kind: MemoryKind = "allocated",
    progress: Progress = _silent,
) -> Fitted:
    """Plan, measure, correct and verify; then leave the plan applied to the live model.

    Raises `InfeasibleBudget`, and `ApplyFailed` if the planned step does not equal the original.
    """
    found = Fitting(workload, Request(steps=steps), progress).fit(memory, memory_kind)
    if found.certificate is not None and found.certificate.verdict == "NOT EQUAL":
        raise ApplyFailed(
            f"the planned step does not equal the original: {found.certificate.reason}. "
            "The model is as it was."
        )
    name = type(workload.model).__name__
    return Fitted(found, apply_plan(found.plan, {name: workload.model}))


def apply(plan: Plan, *roots: torch.nn.Module) -> Applied:
    """Apply a plan to live roots. Raises `ApplyFailed` if it was made for others."""
    named = {type(root).__name__: root for root in roots}
    for name, root in named.items():
        if plan.fingerprint.get(name, fingerprint_of(root)) != fingerprint_of(root):
            raise ApplyFailed(f"the plan was made for another {name}. Plan again for this one.")
    return apply_plan(plan, named)


def verify(
    workload: Workload, plan: Plan, *, steps: int = 3, progress: Progress = _silent
) -> Certificate:
    """Whether the planned workload equals the original."""
    certificate = verify_report(workload, plan, Request(steps=steps), progress=progress)
    assert certificate.report.certificate is not None
    return certificate.report.certificate


def estimate(
    workload: Workload | Callable[[], Model],
    *,
    device: str | None = None,
    progress: Progress = _silent,
) -> Estimate:
    """What a step would need, without running it: nothing is computed, and nothing takes memory.

    `workload` may be a function that makes one; then what it makes takes no memory either, so that a
    model can be estimated that does not fit here. `device`: `"cpu"`, by default; the name of a GPU to
    estimate for, such as `"h100"`; or `"emulated"` for any. Raises `UsageError` for what is no workload,
    and `Unsupported` for an operator of which nobody knows what it gives.
    """
    return Estimate(workload, device=device, progress=progress)


def estimate_report(
    script: Script,
    request: Request,
    *,
    fits: str | None = None,
    max_batch: str | None = None,
    progress: Progress = _silent,
) -> Result:
    """`estimate` of a script with its figures, and the largest batch of its loaders that fits."""
    budget = parse_bytes(fits) if fits is not None else None
    found = Estimate(script, device=script.device, request=request, progress=progress)
    facts = found.facts
    if max_batch is not None:
        facts = msgspec.structs.replace(facts, growth=(found.grown("batch", max_batch),))
    figures = found.trial.figures()
    report = msgspec.structs.replace(
        _report("estimate", script, found.trial),
        original=msgspec.structs.replace(
            figures, step_seconds=0.0, spread_seconds=0.0, rss_bytes=None
        ),
        findings=memory_findings(found.profile),
        waiting=None,
        steps=0,
        budget_bytes=budget,
        memory_kind="reserved" if found.reserved_bytes else "allocated",
        estimated=facts,
    )
    return Result(report, found.profile)


def diagnose_report(
    workload: Workload, request: Request, *, progress: Progress = _silent
) -> Result:
    """`diagnose` with its figures."""
    trial = Fitting(workload, request, progress).observe()
    return Result(_report("diagnose", workload, trial), trial.profile)


def plan_report(
    workload: Workload,
    memory: str | int,
    request: Request,
    *,
    memory_kind: MemoryKind = "allocated",
    frontier: bool = False,
    progress: Progress = _silent,
) -> Result:
    """`plan` with its figures and, if asked, what other budgets would cost."""
    fitting = Fitting(workload, request, progress)
    trial = fitting.observe()
    planner = fitting.planner(trial)
    whole = measured(trial, memory_kind)
    budget = parse_bytes(memory, whole=whole)
    bias = whole - planner.simulated_original
    chosen = planner.plan(budget, bias=bias, memory_kind=memory_kind)
    points: tuple[FrontierPoint, ...] = planner.frontier(bias=bias) if frontier else ()
    report = msgspec.structs.replace(
        _report("plan", workload, trial),
        budget_bytes=budget,
        memory_kind=memory_kind,
        plan=PlanSummary(techniques=chosen.techniques, predicted=chosen.predicted),
        frontier=points,
    )
    return Result(report, trial.profile, None, chosen)


def optimize_report(
    workload: Workload,
    memory: str | int,
    request: Request,
    *,
    memory_kind: MemoryKind = "allocated",
    cures: bool = False,
    progress: Progress = _silent,
) -> Result:
    """The whole loop. Where nothing fits, the report says the smallest budget that would.

    With `cures`, a script's waits are cured too, as a diff beside the plan.
    """
    fitting = Fitting(workload, request, progress)
    try:
        found = fitting.fit(memory, memory_kind)
    except InfeasibleBudget as error:
        assert fitting.original is not None
        return Result(_infeasible(workload, fitting.original, memory, memory_kind, error))
    result = _fitted(workload, found, memory_kind)
    if cures and isinstance(workload, Script):
        fixed = Fixing(workload, request, progress).fix(found.original)
        cured = with_cures(result.report, cures_of(fixed, workload.project))
        result = result._replace(report=cured)
    return result


def optimize_calls_report(
    script: Script,
    memory: str | int | None,
    request: Request,
    *,
    memory_kind: MemoryKind = "allocated",
    progress: Progress = _silent,
) -> Result:
    """The loop for a script that only runs its models; without `memory` in as little as can be."""
    fitting = Fitting(script, msgspec.structs.replace(request, infers=True), progress)
    try:
        found = fit_calls(fitting, script, memory, memory_kind)
    except InfeasibleBudget as error:
        assert fitting.original is not None
        return Result(_infeasible(script, fitting.original, memory or 0, memory_kind, error))
    result = _fitted(script, found, memory_kind)
    if memory is None:
        return result._replace(report=msgspec.structs.replace(result.report, budget_bytes=None))
    return result


def verify_report(
    workload: Workload, plan: Plan, request: Request, *, progress: Progress = _silent
) -> Result:
    """`verify` of a plan, with its figures. Raises `ApplyFailed` for a plan of another script."""
    check_script(plan, workload)
    infers = is_of_calls(plan) and isinstance(workload, Script)
    fitting = Fitting(workload, msgspec.structs.replace(request, infers=infers), progress)
    original = fitting.observe()
    planned = fitting.run_planned(plan)
    certificate = fitting.verify(original, plan, planned)
    report = msgspec.structs.replace(
        _report("verify", workload, original),
        planned=planned.figures(),
        budget_bytes=plan.budget_bytes,
        memory_kind=plan.memory_kind,
        plan=PlanSummary(techniques=plan.techniques, predicted=plan.predicted),
        certificate=certificate,
    )
    return Result(report, original.profile, planned.profile, plan)


def verify_scripts(
    one: Script, other: Script, request: Request, *, progress: Progress = _silent
) -> Result:
    """Whether two scripts compute the same, step by step."""

    def run(script: Script) -> Trial:
        with working_folder() as folder:
            return run_trial(script, request, folder, progress)

    original, again, planned = run(one), run(one), run(other)
    contest = Contest(one, other, request, request)
    certificate = certify(contest, original, again, planned, progress)
    report = msgspec.structs.replace(
        _report("verify", one, original),
        planned=planned.figures() if planned.profile else None,
        certificate=certificate,
    )
    return Result(report, original.profile, planned.profile)


def cure_report(
    script: Script,
    request: Request,
    *,
    unsafe: bool = False,
    write: bool = False,
    progress: Progress = _silent,
) -> Result:
    """The cures of the waits in a script's own source, each proved.

    With `write` they are in the files afterwards, else only in the report's diff. `unsafe`: make also
    those that rest on what no run has shown.
    """
    fixed = Fixing(script, request, progress, unsafe=unsafe).fix()
    if write:
        write_sources(fixed.texts, fixed.before, script.project)
    cures = cures_of(fixed, script.project, written=write and bool(fixed.texts))
    report = msgspec.structs.replace(
        _report("optimize", script, fixed.original),
        planned=fixed.planned.figures() if fixed.planned else None,
        certificate=cures.certificate,
    )
    after = fixed.planned.profile if fixed.planned else None
    return Result(with_cures(report, cures), fixed.original.profile, after)


def cure(
    script: Script, *, unsafe: bool = False, write: bool = False, progress: Progress = _silent
) -> Cures:
    """Cure the waits in a script's own source, and prove each cure. With `write`, into the files."""
    result = cure_report(script, Request(), unsafe=unsafe, write=write, progress=progress)
    assert result.report.cures is not None
    return result.report.cures


def check_script(plan: Plan, workload: Workload) -> None:
    """Raises `ApplyFailed` for a plan that was made for another script."""
    path = workload.path if isinstance(workload, Script) else None
    if path is None or not plan.script_sha256:
        return
    if not path.is_file():
        raise UsageError(f"there is no script {path}.")
    if sha256_of(path) != plan.script_sha256:
        raise ApplyFailed(
            f"the plan was made for {plan.script}, and {path.name} is another script or has changed "
            "since. Plan again; or, if you know that it still fits, delete `script_sha256` from the plan."
        )


def _report(verb: str, workload: Workload, trial: Trial) -> Report:
    profile = trial.profile
    findings, waiting = priced(profile, find(profile)) if profile is not None else ((), None)
    findings = with_settings(findings, profile.project) if profile is not None else findings
    return Report(
        torchtrim=__version__,
        torch=str(torch.__version__),
        verb=verb,
        device=trial.device,
        script=workload.target if isinstance(workload, Script) else type(workload.model).__name__,
        project=str(workload.project) if isinstance(workload, Script) else str(Path.cwd()),
        machine=_machine(trial.device),
        steps=len(trial.timed),
        original=trial.figures() if profile is not None else None,
        findings=findings,
        waiting=waiting,
        holders=holders(profile) if profile is not None else (),
        notes=trial.notes,
    )


def _fitted(workload: Workload, found: Fit, memory_kind: MemoryKind) -> Result:
    report = msgspec.structs.replace(
        _report("optimize", workload, found.original),
        planned=found.planned.figures() if found.planned else None,
        budget_bytes=found.budget_bytes,
        memory_kind=memory_kind,
        plan=PlanSummary(techniques=found.plan.techniques, predicted=found.plan.predicted),
        certificate=found.certificate,
        notes=(*found.original.notes, *found.notes),
    )
    after = found.planned.profile if found.planned else None
    return Result(report, found.original.profile, after, found.plan)


def _infeasible(
    workload: Workload,
    original: Trial,
    memory: str | int,
    kind: MemoryKind,
    error: InfeasibleBudget,
) -> Report:
    return msgspec.structs.replace(
        _report("optimize", workload, original),
        budget_bytes=parse_bytes(memory, whole=measured(original, kind)),
        smallest_bytes=error.smallest_bytes,
        memory_kind=kind,
        notes=(str(error), *original.notes),
    )


def _machine(device: str) -> str:
    """The processor, its threads and, where it was used, the GPU."""
    facts = [platform.system(), platform.machine(), f"{os.cpu_count()} cores"]
    facts.append(f"{torch.get_num_threads()} torch threads")
    if device.startswith("cuda") and torch.cuda.is_available():
        facts.append(torch.cuda.get_device_name(device))
    return ", ".join(facts)
