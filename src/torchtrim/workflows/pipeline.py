"""Plans of a script as a pipeline, certified up to rounding by one process in the schedule's order, and from
there bit by bit."""

from __future__ import annotations

import functools
import math
import os
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from msgspec.structs import replace

from torchtrim import __version__
from torchtrim.certify import noise
from torchtrim.costs.devices import DEVICES
from torchtrim.costs.roofline import estimate
from torchtrim.errors import TorchtrimError, UsageError
from torchtrim.executor.apply import digest_of
from torchtrim.pipelines.orders import order_of
from torchtrim.planner.plans import pipeline_plan
from torchtrim.planner.stages.chain import ChainReader
from torchtrim.planner.stages.choose import (
    PipelineChoice,
    PipelineSettings,
    choose,
    choose_clocked,
    pipeline_of,
)
from torchtrim.records.budget import memory_limit
from torchtrim.records.certificate import Certificate, Difference, Verdict
from torchtrim.records.pipeline import Bar, Pipeline, PipelineReport, ScheduleFigures, StageSeconds
from torchtrim.records.plan import Plan
from torchtrim.records.profile import Profile, is_emulated
from torchtrim.records.report import Report, Result
from torchtrim.records.trial import Request
from torchtrim.report.assemble import with_plan
from torchtrim.runner.planned_script import check_script
from torchtrim.runner.script import Script, working_folder
from torchtrim.runner.stage_worker import VALUES, How, StageTask, StageTrial, run_stages
from torchtrim.runner.trials import Progress, Workload
from torchtrim.workflows.findings import report_of, subject_of
from torchtrim.workflows.optimize.fitting import Fitting

_MOST_BARS = 2000  # a page draws as many quickly, and more are thinner than a pixel
_FLOOR = 1e-3  # of the largest gradient: a smaller tensor is zero up to rounding
_DEVICE = "a100"


def plan_pipeline(
    script: Script,
    memory: str | int,
    request: Request,
    *,
    stages: int,
    replicas: int = 1,
    progress: Progress = lambda _: None,
) -> Result:
    """Plan the quickest pipeline of `stages` x `replicas` ranks, each within the budget.

    Raises `Unsupported`, `InfeasibleBudget`.
    """
    limit = memory_limit(memory)
    fitting = Fitting(script, request, progress)
    trial = fitting.observe()
    planner = fitting.planner(trial)
    budget = limit.budget(trial.peak_bytes).bytes
    reader = ChainReader(planner.profile, trial.seconds, _times(planner.profile))
    chain_of = functools.lru_cache(maxsize=None)(reader.chain)
    progress("looking for cuts, a schedule and micro-batches")
    ways = PipelineSettings(stages, replicas)
    chosen = choose(chain_of, ways, budget, order_of)
    plan_of = functools.partial(
        pipeline_plan,
        planner.profile,
        fingerprint=trial.fingerprint,
        budget_bytes=budget,
        script_sha256=digest_of(script.path) if script.path else "",
    )
    note = ""
    if planner.profile.device == "cpu":
        with working_folder() as folder:
            runs = Runs(script, plan_of(chosen.pipeline), 1, folder, progress)
            chosen, note = clocked(runs, chosen, ways)
    plan = plan_of(chosen.pipeline)
    report = with_plan(report_of("plan", script, trial), plan, plan.budget)
    notes = (*report.notes, note) if note else report.notes
    report = replace(report, pipeline=_shown(chosen), findings=(), notes=notes)
    return Result(report, trial.profile, None, plan)


def clocked(
    runs: Runs, chosen: PipelineChoice, ways: PipelineSettings
) -> tuple[PipelineChoice, str]:
    """Choose again by the times of the stages' actions, run one by one in this process.

    If they fail, return the given choice, and the reason.
    """
    several = [pipeline_of(chosen.pipeline.root, one, ways) for one in chosen.shortlist]
    try:
        clocks = runs.clocks(several)
    except TorchtrimError as error:
        return chosen, (
            "the stages were not run, so their times are sums over the whole batch's operators, "
            f"and a backward that is split in two is assumed to cost no more than a whole one: "
            f"{error}"
        )
    return choose_clocked(chosen, clocks, ways), ""


def _times(profile: Profile) -> Sequence[float] | None:
    """Return operators' seconds on the emulated device, by the roofline; None if they were measured."""
    if not is_emulated(profile.device):
        return None
    device = DEVICES[profile.device.partition(" ")[2] or _DEVICE]
    return estimate(profile, device).device_seconds


def _shown(chosen: PipelineChoice) -> PipelineReport:
    bars = tuple(
        Bar(
            rank=rank,
            stage=bar.action.stage,
            kind=bar.action.kind,
            batch=bar.action.batch,
            start=bar.start,
            end=bar.end,
        )
        for rank, line in enumerate(chosen.best.simulated.bars)
        for bar in line
    )
    return PipelineReport(
        pipeline=chosen.pipeline,
        in_flight=chosen.best.simulated.in_flight,
        schedules=tuple(
            ScheduleFigures(
                schedule=one.schedule,
                microbatches=one.microbatches,
                seconds=one.simulated.seconds,
                bubble=one.simulated.bubble,
                peak_bytes=one.peak,
            )
            for one in chosen.others
        ),
        bars=bars if len(bars) <= _MOST_BARS else (),
    )


class StagedRun(NamedTuple):
    """The trials of a run's ranks, and their folders."""

    trials: list[tuple[StageTrial, Path]]

    @property
    def first(self) -> StageTrial:
        """The trial of the first rank."""
        return self.trials[0][0]

    def digests(self) -> list[dict[str, str]]:
        """Return the digests of each step, by name, from all ranks."""
        steps: list[dict[str, str]] = [{} for _ in self.first.steps]
        for trial, _ in self.trials:
            for merged, own in zip(steps, trial.steps, strict=False):
                merged.update(own)
        return steps

    def gradients(self) -> dict[str, array[float]]:
        """Return the values of the first step's gradients."""
        found = {}
        for trial, folder in self.trials:
            for number, name in enumerate(trial.names):
                found[name] = array("d", (folder / f"{VALUES}{number}").read_bytes())
        return found


class Runs:
    """Runs of a script: unchanged, in the schedule's order, and as a pipeline."""

    def __init__(
        self, script: Script, plan: Plan, steps: int, folder: Path, tell: Progress
    ) -> None:
        self._script, self._plan, self._steps = script, plan, steps
        self._folder, self._tell = folder, tell
        assert plan.pipeline is not None
        self.pipeline: Pipeline = plan.pipeline
        self._threads = max(1, (os.cpu_count() or 1) // self.pipeline.processes)

    @classmethod
    def links_of_sums(cls, script: Script, plan: Plan, steps: int) -> Sums:
        """Check the first link alone."""
        with working_folder() as folder:
            return _sums(cls(script, plan, steps, folder, lambda _: None))[0]

    def clocks(self, pipelines: Sequence[Pipeline]) -> list[tuple[StageSeconds, ...]]:
        """Return the seconds of each stage's actions, for each pipeline, in one process."""
        several = tuple({_runs_as(one): one for one in pipelines}.values())
        task = replace(self._task("clocked"), clocked=several)
        folder = self._folder / "clocked"
        folder.mkdir()
        tell = lambda text: self._tell(f"clocking stages: {text}")  # noqa: E731
        clocks = run_stages(self._script, task, 1, folder, tell)[0][0].clocks
        known = dict(zip(map(_runs_as, several), clocks, strict=True))
        return [known[_runs_as(one)] for one in pipelines]

    def _task(self, how: How, *, double: bool = False) -> StageTask:
        return StageTask(
            target=self._script.command,
            plan=replace(self._plan, fingerprint={}) if double else self._plan,
            how=how,
            steps=self._steps,
            threads=self._threads,
            double=double,
        )

    def run(
        self,
        how: How,
        *,
        still: bool = False,
        double: bool = False,
        measured: bool = False,
        nudged: int = 0,
    ) -> StagedRun:
        """Run the script once."""
        ranks = self.pipeline.processes if how == "pipeline" else 1
        task = replace(
            self._task(how, double=double), still=still, measured=measured, nudged=nudged
        )
        said = f"{how}{', in float64' if double else ''}{f' {nudged}' if nudged else ''}"
        folder = self._folder / said.replace(" ", "-").replace(",", "") / str(still)
        folder.mkdir(parents=True)
        tell = lambda text: self._tell(f"{said}: {text}")  # noqa: E731
        return StagedRun(run_stages(self._script, task, ranks, folder, tell))


def _runs_as(pipeline: Pipeline) -> tuple[Any, ...]:
    """Return the settings that decide a stage's actions, whatever their order."""
    again = tuple(stage.recompute for stage in pipeline.stages)
    return pipeline.cuts, pipeline.microbatches, again


def verify_pipeline(
    script: Workload, plan: Plan, request: Request, *, progress: Progress = lambda _: None
) -> Result:
    """Certify that the pipeline equals the script, in two links.

    The whole batch equals, up to rounding, the sum over micro-batches in the schedule's order, in one
    process; this sum equals the pipeline in several processes, bit for bit. Raises `ApplyFailed`.
    """
    if not isinstance(script, Script):
        raise UsageError(
            "the plan is a pipeline of several processes, and a live model has one: verify its script."
        )
    check_script(plan, script)
    if script.device not in (None, "cpu"):
        raise UsageError("a pipeline is certified on the CPU, with gloo: leave --device out.")
    with working_folder() as folder:
        runs = Runs(script, plan, request.steps, folder, progress)
        certificate, dropped = _certified(runs, request.steps)
    subject = subject_of(script, "cpu")
    report = Report(
        torchtrim=__version__,
        torch=subject.torch,
        verb="verify",
        device="cpu",
        script=subject.script,
        project=subject.project,
        machine=subject.machine,
        steps=request.steps,
        certificate=certificate,
        notes=(_DROPS,) if dropped else (),
    )
    return Result(with_plan(report, plan, plan.budget), None, None, plan)


class Sums(NamedTuple):
    """First link: the whole batch against the sum in the schedule's order.

    `difference` and `double`: largest relative difference of gradients, and the same in float64; `worst`: the
    parameter with the largest.
    """

    verdict: Verdict
    difference: float
    double: float
    worst: str


def _sums(runs: Runs) -> tuple[Sums, StagedRun, StagedRun]:
    """Check the first link, without dropout, since each micro-batch draws its own numbers."""
    ways: tuple[How, ...] = ("whole", "in order")
    whole, ordered = (runs.run(how, still=True) for how in ways)
    difference, worst = _largest(whole, ordered)
    double = 0.0
    verdict: Verdict = "BITWISE"
    if difference:
        plain, other = (runs.run(how, still=True, double=True) for how in ways)
        double, _ = _largest(plain, other)
        moved = {
            seed: runs.run("whole", still=True, double=True, nudged=seed) for seed in noise.SEEDS
        }
        beyond = _beyond(plain, other, moved)
        verdict, worst = ("NOT EQUAL", beyond) if beyond else ("ROUNDING", worst)
    return Sums(verdict, difference, double, worst), whole, ordered


def _beyond(plain: StagedRun, other: StagedRun, moved: dict[int, StagedRun]) -> str:
    """Return the first gradient that differs by more than rounding, in float64; empty if none does."""
    apart = _apart(plain, other)
    own = {seed: _apart(plain, run) for seed, run in moved.items()}
    most = noise.factor(len(apart), noise.spreads((*moved,)))
    for name, gap in apart.items():
        gaps = {seed: found.get(name, math.inf) for seed, found in own.items()}
        if gap > noise.limit(noise.spread(gaps), most):
            return name
    return ""


def _certified(runs: Runs, steps: int) -> tuple[Certificate, bool]:
    """Check both links; also return True if the model uses dropout."""
    sums, whole, ordered = _sums(runs)
    dropped = whole.first.dropped
    staged = runs.run("pipeline")
    one = runs.run("in order") if dropped else ordered
    digests = one.digests()
    gradients = sum(name.startswith("gradient:") for name in digests[0])
    parameters, times = len(digests[0]) - gradients, f"x {len(digests)} steps"
    differs = first_difference(one, staged)
    verdict: Verdict = "NOT EQUAL" if differs else sums.verdict
    quantity, _, wrong = differs.partition(":")
    if sums.verdict == "NOT EQUAL":
        quantity, wrong = "gradient", sums.worst
    certificate = Certificate(
        verdict=verdict,
        compared=(f"{gradients} gradients {times}", f"{parameters} parameters {times}"),
        largest_difference=sums.difference if math.isfinite(sums.difference) else None,
        first_difference=Difference(module=wrong, op=quantity) if verdict == "NOT EQUAL" else None,
        noise=0.0,
        seeds="torchtrim",
        steps=steps,
        reason=_reason(sums, differs, runs.pipeline),
    )
    return certificate, dropped


def _largest(one: StagedRun, other: StagedRun) -> tuple[float, str]:
    """Return the largest difference of the first step's gradients, and its parameter.

    It is relative to the tensor's largest value, or that of all tensors for a tensor near zero; infinite if
    one run lacks a gradient.
    """
    apart = _apart(one, other)
    return max(((gap, name) for name, gap in apart.items()), default=(0.0, ""))


def _apart(one: StagedRun, other: StagedRun) -> dict[str, float]:
    """Return the difference of each gradient of the first step, as `_largest` measures it."""
    ours, theirs = one.gradients(), other.gradients()
    if ours.keys() != theirs.keys():
        return dict.fromkeys(ours.keys() ^ theirs.keys(), math.inf)
    tops = {name: max(map(abs, values), default=0.0) for name, values in ours.items()}
    floor = max(tops.values(), default=0.0) * _FLOOR
    relative = {}
    for name, values in ours.items():
        apart = max((abs(a - b) for a, b in zip(values, theirs[name], strict=True)), default=0.0)
        scale = max(tops[name], floor)
        relative[name] = (apart / scale if scale else 0.0) if apart == apart else math.inf
    return relative


def first_difference(one: StagedRun, other: StagedRun) -> str:
    """Return the first difference, as `quantity:name`; empty if equal."""
    for ours, theirs in zip(one.digests(), other.digests(), strict=True):
        for name in sorted({*ours, *theirs}):
            if ours.get(name) != theirs.get(name):
                return name
    return ""


def _reason(sums: Sums, differs: str, pipeline: Pipeline) -> str:
    parts = f"{pipeline.microbatches} micro-batches"
    apart = f"{sums.difference:.1e}, in float64 {sums.double:.1e}"
    if sums.verdict == "NOT EQUAL":
        return (
            f"the sum over {parts} is not the whole batch's: gradients differ by {apart}. Samples are "
            "mixed, or the loss is not a mean with equal weights of all samples"
        )
    how = f"up to rounding ({apart})" if sums.difference else "bit for bit"
    first = (
        f"the whole batch equals the sum over {parts}, in the order of {pipeline.schedule}, {how}"
    )
    if differs:
        return f"{first}; but the pipeline does not equal that: {differs} differs"
    return f"{first}; and that equals the pipeline, bit for bit"


_DROPS = (
    "the model uses dropout: each micro-batch draws its own numbers, so a run differs from the original as "
    "with another seed. The first link was checked without dropout, the second with it."
)
