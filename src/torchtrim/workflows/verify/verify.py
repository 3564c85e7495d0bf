"""Whether a planned script, or another one, computes the same."""

from __future__ import annotations

from pathlib import Path

import msgspec

from torchtrim.capture.workload import TrainStep
from torchtrim.certify.certify import Contest, failed
from torchtrim.certify.ranks import certify_ranks
from torchtrim.errors import ScriptFailed, UsageError
from torchtrim.records.kept_certificate import load_certificate
from torchtrim.records.plan import Plan
from torchtrim.records.report import Result
from torchtrim.records.trial import Request, Trial
from torchtrim.report.assemble import with_plan, with_planned
from torchtrim.runner.script import Script, working_folder
from torchtrim.runner.trials import Progress, Workload, run_trial
from torchtrim.workflows.findings import report_of
from torchtrim.workflows.made_for import check_script
from torchtrim.workflows.optimize.fitting import Fitting
from torchtrim.workflows.pipeline import verify_pipeline
from torchtrim.workflows.serve import is_of_calls
from torchtrim.workflows.verify.check import Compared, judged, kept, script_of, with_notes


def verify_report(
    workload: Workload, plan: Plan, request: Request, *, progress: Progress = lambda _: None
) -> Result:
    """Whether the planned workload equals the original, with its figures.

    Raises `ApplyFailed` for a plan of another script.
    """
    check_script(plan, workload)
    if plan.pipeline is not None:
        return verify_pipeline(workload, plan, request, progress=progress)
    infers = is_of_calls(plan) and isinstance(workload, Script)
    asked = _with_round_trip(request, workload)
    fitting = Fitting(workload, msgspec.structs.replace(asked, infers=infers), progress)
    original = fitting.observe()
    planned = fitting.run_planned(plan)
    certificate = fitting.verify(original, plan, planned)
    report = with_planned(report_of("verify", workload, original), planned, certificate)
    report = with_plan(report, plan, plan.budget)
    result = Result(report, original.profile, planned.profile, plan)
    return kept(result, Compared(workload, None, plan, request), original)


def verify_pair(
    one: Workload, other: Workload, request: Request, *, progress: Progress = lambda _: None
) -> Result:
    """Whether two workloads compute the same, step by step: two scripts, or two live steps.

    Of two live steps the one is run after the other, from the same random state. Where the other fails, it is
    not equal.
    """
    if isinstance(one, Script) != isinstance(other, Script):
        raise UsageError("compare a script with a script, or a live step with a live step.")
    if isinstance(one, TrainStep) != isinstance(other, TrainStep):
        raise UsageError("compare a step that trains with one that trains, or a call with a call.")
    request = _with_round_trip(request, one)
    contest = Contest(one, other, request, request)
    original = _run(contest.original, request, "original", progress)
    report = report_of("verify", one, original)
    planned: Trial | None = None
    try:
        planned = _run(contest.planned, request, "the other", progress)
    except (
        ScriptFailed,
        RuntimeError,
        ValueError,
        TypeError,
        LookupError,
        ArithmeticError,
    ) as error:
        certificate = failed(original, error)
    else:
        certificate = certify_ranks(contest, original, planned, progress)
    report = with_planned(report, planned, certificate)
    result = Result(report, original.profile, planned.profile if planned is not None else None)
    return kept(result, Compared(one, other, None, request), original)


def check_certificate(
    path: Path, *, timeout: float = 600.0, progress: Progress = lambda _: None
) -> tuple[bool, Result]:
    """Repeat a certificate that was kept: whether it still holds, and the new one with what has changed.

    Raises `UnreadableInput` for another file, and `UsageError` where its scripts are gone.
    """
    old = load_certificate(path)
    request = Request(steps=old.steps, warmup=old.warmup)
    one = script_of(old.original, path.parent, old.device, timeout)
    if old.plan is not None:
        plan = msgspec.structs.replace(old.plan, script_sha256="")
        result = verify_report(one, plan, request, progress=progress)
    elif old.other is not None:
        other = script_of(old.other, path.parent, old.device, timeout)
        result = verify_pair(one, other, request, progress=progress)
    else:
        raise UsageError(f"{path} names neither a plan nor a second script to compare with.")
    assert result.certificate is not None
    holds, notes = judged(old, result.certificate)
    return holds, with_notes(result, notes)


def _with_round_trip(request: Request, workload: Workload) -> Request:
    """Scripts save and load on the way; a live model stays as it is."""
    return msgspec.structs.replace(request, round_trip=isinstance(workload, Script))


def _run(workload: Workload, request: Request, what: str, progress: Progress) -> Trial:
    with working_folder() as folder:
        return run_trial(workload, request, folder, lambda text: progress(f"{what}: {text}"))
