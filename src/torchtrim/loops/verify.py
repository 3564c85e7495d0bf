"""Whether a planned script, or another one, computes the same."""

from __future__ import annotations

import msgspec

from torchtrim.errors import ApplyFailed, UsageError
from torchtrim.loops.findings import report_of
from torchtrim.loops.optimize import Fitting
from torchtrim.loops.serve import is_of_calls
from torchtrim.records.plan import Plan
from torchtrim.records.report import Result
from torchtrim.records.trial import Request, Trial
from torchtrim.report.assemble import with_plan, with_planned
from torchtrim.run.script import Script, working_folder
from torchtrim.run.trials import Progress, Workload, run_trial
from torchtrim.techniques.fingerprint import sha256_of
from torchtrim.verifier.certify import Contest, certify


def verify_report(
    workload: Workload, plan: Plan, request: Request, *, progress: Progress = lambda _: None
) -> Result:
    """Whether the planned workload equals the original, with its figures.

    Raises `ApplyFailed` for a plan of another script.
    """
    check_script(plan, workload)
    infers = is_of_calls(plan) and isinstance(workload, Script)
    fitting = Fitting(workload, msgspec.structs.replace(request, infers=infers), progress)
    original = fitting.observe()
    planned = fitting.run_planned(plan)
    certificate = fitting.verify(original, plan, planned)
    report = with_planned(report_of("verify", workload, original), planned, certificate)
    report = with_plan(report, plan, plan.memory_kind, plan.budget_bytes)
    return Result(report, original.profile, planned.profile, plan)


def verify_scripts(
    one: Script, other: Script, request: Request, *, progress: Progress = lambda _: None
) -> Result:
    """Whether two scripts compute the same, step by step."""

    def run(script: Script, what: str) -> Trial:
        with working_folder() as folder:
            return run_trial(script, request, folder, lambda text: progress(f"{what}: {text}"))

    original = run(one, "original")
    planned = run(other, "the other")
    contest = Contest(one, other, request, request)
    certificate = certify(contest, original, planned, progress)
    report = with_planned(report_of("verify", one, original), planned, certificate)
    return Result(report, original.profile, planned.profile)


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
