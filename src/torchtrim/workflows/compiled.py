"""Scripts whose `torch.compile` stays on: their compiled graphs' memory, and plans of what those save."""

from __future__ import annotations

from msgspec.structs import replace

from torchtrim.certify.contest import Contest
from torchtrim.certify.variants import certify_ranks
from torchtrim.core.units import counted, format_apart, format_bytes
from torchtrim.core.words import first_line
from torchtrim.errors import TorchtrimError, Unsupported
from torchtrim.executor.apply import digest_of
from torchtrim.planner.plans import graphs_plan
from torchtrim.records.budget import Budget, MemoryLimit
from torchtrim.records.certificate import with_proof
from torchtrim.records.plan import Plan, Prediction
from torchtrim.records.report import Result
from torchtrim.records.trial import CompiledMemory, Request, Trial
from torchtrim.report.assemble import figures_of, with_plan, with_planned
from torchtrim.rules import tt403_compiled_again, tt404_graph_break
from torchtrim.rules.registry import diagnose, in_order
from torchtrim.runner.compiling import INDUCTOR
from torchtrim.runner.script import Script
from torchtrim.runner.trials import Progress, run_once
from torchtrim.workflows.findings import report_of

_OF_COMPILES = (tt403_compiled_again.RULE.code, tt404_graph_break.RULE.code)
_ROUNDS = 2
"""Corrections by a measured peak: what the script computes eagerly is not simulated."""


class GraphsMiss(Unsupported):
    """No plan of a script's compiled graphs fits. `budget_bytes`: the budget, compiled."""

    def __init__(self, message: str, budget_bytes: int) -> None:
        super().__init__(message)
        self.budget_bytes = budget_bytes


def compiles(original: Trial) -> bool:
    """Return True if a script, run eagerly, would have compiled graphs that can be planned."""
    return INDUCTOR in original.backends


def graphs_of(script: Script, request: Request, saving: int, progress: Progress) -> CompiledMemory:
    """Return the memory of a script's compiled graphs, with a plan that saves some bytes.

    Raises `Unsupported` if Inductor compiles none of what it trains.
    """
    request = _plain(request, graphs_save=saving, steps=0, warmup=1)
    trial = run_once(script, request, "compiled graphs, without kernels", progress)
    if trial.compiled is None:
        raise Unsupported(trial.unplanned or "the script compiles nothing that trains by Inductor")
    return trial.compiled


def with_compiled(result: Result, script: Script, request: Request, progress: Progress) -> Result:
    """Add to the result of an eager run the script's figures when compiled, and what its graphs save.

    Its profile is told what was compiled again or in parts, and the findings on that are added.
    """
    report = result.report
    try:
        memory = graphs_of(script, request, 0, progress)
        compiled = _original(script, _plain(request), progress)
    except TorchtrimError as error:
        said = f"the memory of the compiled graphs is not known: {first_line(error)}"
        return result._replace(report=replace(report, notes=(said, *report.notes)))
    notes = (*_graph_notes(memory), *report.notes)
    report = replace(report, compiled=figures_of(compiled), notes=notes)
    if result.before is None:
        return result._replace(report=report)
    profile = replace(result.before, compiled=[*compiled.again])
    found = in_order(profile, (*report.findings, *diagnose(profile, _OF_COMPILES)))
    return result._replace(report=replace(report, findings=found), before=profile)


def _graph_notes(memory: CompiledMemory) -> tuple[str, ...]:
    """Return what compiled graphs save and need, in sentences."""
    graphs = (
        f"{number}: saves {format_bytes(saved)}, peak {format_bytes(peak)}"
        for number, (saved, peak) in enumerate(memory.graphs, 1)
    )
    said = (
        f"compiled, by simulation of Inductor's code, the graphs' {counted(memory.calls, 'call')} save "
        f"{format_bytes(memory.saved_bytes)} for backward, and peak at "
        f"{format_bytes(memory.peak_bytes)} over what is live before (graph {'; '.join(graphs)})"
    )
    unknown = ", ".join(memory.unmeasured)
    return (said, *([f"the workspace of {unknown} is not known"] if unknown else []))


def optimize_compiled(
    script: Script, limit: MemoryLimit, request: Request, progress: Progress
) -> Result:
    """Fit a script's compiled graphs into a budget, and certify the plan against the compiled original.

    Raises `Unsupported` if its graphs cannot be planned, and `GraphsMiss` if no plan of theirs fits.
    """
    request = _plain(request)
    original = _original(script, request, progress)
    whole = original.peak_bytes
    budget = limit.budget(whole)
    saving, lowest = whole - budget.bytes, whole
    if saving <= 0:
        return _result(script, original, None, _plan(script, original, None, budget), budget)
    for _ in range(_ROUNDS):
        memory = graphs_of(script, replace(request, phases=_phases(original)), saving, progress)
        plan = _plan(script, original, memory, budget)
        if not plan.compiled:
            break
        planned = run_once(script, replace(request, plan=plan), "compiled, planned", progress)
        lowest = min(lowest, planned.peak_bytes)
        if planned.peak_bytes <= budget.bytes:
            return _certified(script, request, original, planned, plan, progress)
        saving += planned.peak_bytes - budget.bytes
    kept = f"; `--memory {-(-lowest // 1024)}KiB` keeps it compiled" if lowest < whole else ""
    needs, least, asked = format_apart(whole, lowest, budget.bytes)
    raise GraphsMiss(
        f"compiled, the step needs {needs}, and the plan of its graphs with the smallest peak {least}, "
        f"over the budget of {asked}{kept}",
        budget.bytes,
    )


def _phases(original: Trial) -> dict[str, int]:
    """Return the peaks of the phases of the step with the highest peak."""
    steps = original.steps[original.request.warmup :] or original.steps[-1:]
    return max(steps, key=lambda step: step.peak_bytes).phases


def _original(script: Script, request: Request, progress: Progress) -> Trial:
    """Run the compiled script. Raises `Unsupported` if no step was seen."""
    original = run_once(script, request, "compiled original", progress)
    if not original.peak_bytes:
        raise Unsupported(
            "no step was seen in the compiled script: no forward of a model, no call of a compiled function "
            "that computes with parameters. Compile the model itself, as in "
            "`model = torch.compile(model)`, to have its graphs planned"
        )
    return original


def _certified(
    script: Script,
    request: Request,
    original: Trial,
    planned: Trial,
    plan: Plan,
    progress: Progress,
) -> Result:
    contest = Contest(script, script, request, replace(request, plan=plan))
    certificate = certify_ranks(contest, original, planned, progress)
    plan = with_proof(plan, certificate, script.args)
    result = _result(script, original, planned, plan, plan.budget)
    return result._replace(report=replace(result.report, certificate=certificate))


def _plain(request: Request, **changes: int) -> Request:
    """Return a request without what compiled graphs hide: operators and their times."""
    return replace(request, compiles=True, times=0, grows=False, traced=-1, **changes)


def _plan(script: Script, original: Trial, memory: CompiledMemory | None, budget: Budget) -> Plan:
    saved = memory.peak_bytes - memory.planned_peak if memory is not None else 0
    seconds = memory.added_seconds if memory is not None else 0.0
    return graphs_plan(
        script.target,
        memory.plan if memory is not None else (),
        fingerprint=original.fingerprint,
        predicted=Prediction(
            peak_bytes=original.peak_bytes - saved,
            step_seconds=original.seconds + seconds,
            device=original.device,
        ),
        budget_bytes=budget.bytes,
        script_sha256=digest_of(script.path) if script.path else "",
    )


def _result(
    script: Script, original: Trial, planned: Trial | None, plan: Plan, budget: Budget
) -> Result:
    report = with_planned(report_of("optimize", script, original), planned, None)
    report = with_plan(report, plan, budget)
    notes = () if plan.compiled else ("the compiled original fits the budget unchanged",)
    return Result(replace(report, notes=(*notes, *report.notes)), None, None, plan)
