"""Certificates of planned scripts, pairs of programs, saved certificates, and steps of a run."""

from __future__ import annotations

import hashlib
import io
import platform
import random
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from msgspec.structs import replace

from torchtrim import __version__
from torchtrim.capture.optimizers import names_of
from torchtrim.capture.workload import TrainStep
from torchtrim.certify.certify import failed
from torchtrim.certify.compare import KEPT_BY_PYTHON
from torchtrim.certify.contest import Contest
from torchtrim.certify.variants import certify_ranks, judge, judge_region
from torchtrim.errors import Diverged, ScriptFailed, UsageError
from torchtrim.executor.apply import sha256_of
from torchtrim.records.certificate import (
    KeptCertificate,
    Program,
    Verdict,
    load_certificate,
    with_proof,
)
from torchtrim.records.commands import command
from torchtrim.records.files import write_atomically
from torchtrim.records.plan import Plan
from torchtrim.records.report import Result
from torchtrim.records.trial import Request, Trial
from torchtrim.report.assemble import with_plan, with_planned
from torchtrim.runner.live import Live, StepVerdict, tell
from torchtrim.runner.planned_script import EndOfScript, check_script, run_planned
from torchtrim.runner.run_report import RunReport
from torchtrim.runner.script import Script
from torchtrim.runner.trials import Progress, Workload, run_once
from torchtrim.workflows.findings import machine, report_of
from torchtrim.workflows.optimize.fitting import Fitting

_RESULTS = "2:"
_ORDER: tuple[Verdict, ...] = ("BITWISE", "ROUNDING", "AS ASKED", "UNDECIDED", "NOT EQUAL")


def verify_report(
    workload: Workload, plan: Plan, request: Request, *, progress: Progress = lambda _: None
) -> Result:
    """Compare the planned workload with the original. Raises `ApplyFailed` for another script's plan."""
    check_script(plan, workload)
    if plan.pipeline is not None:
        # Late, since torch's pipelining imports dynamo and inductor, which takes seconds.
        from torchtrim.workflows.pipeline import verify_pipeline

        return verify_pipeline(workload, plan, request, progress=progress)
    infers = plan.is_of_calls and isinstance(workload, Script)
    saves = isinstance(workload, Script)  # the state of a live model must not change
    compiles = bool(plan.compiled)
    request = replace(request, infers=infers, round_trip=saves, compiles=compiles)
    fitting = Fitting(workload, request, progress)
    with fitting.interruptible():
        original = fitting.observe()
        planned = fitting.run_planned(plan)
        certificate = fitting.verify(original, plan, planned)
    report = with_planned(report_of("verify", workload, original), planned, certificate)
    report = with_plan(report, plan, plan.budget, original.profile)
    args = workload.args if isinstance(workload, Script) else None
    proven = with_proof(plan, certificate, args) if plan.techniques or compiles else plan
    result = Result(report, original.profile, planned.profile, proven)
    return _with_certificate(result, workload, None, plan, request, original)


def verify_pair(
    one: Workload, other: Workload, request: Request, *, progress: Progress = lambda _: None
) -> Result:
    """Compare two scripts or two live steps, step by step.

    Two live steps run one after the other, from the same random state. If the other fails, it is not equal.
    """
    if isinstance(one, Script) != isinstance(other, Script):
        raise UsageError("compare a script with a script, or a live step with a live step.")
    if isinstance(one, TrainStep) != isinstance(other, TrainStep):
        raise UsageError("compare a step that trains with one that trains, or a call with a call.")
    request = replace(request, round_trip=isinstance(one, Script))
    contest = Contest(one, other, request, request)
    original = run_once(one, request, "original", progress)
    report = report_of("verify", one, original)
    planned: Trial | None = None
    try:
        planned = run_once(other, request, "the other", progress)
    except _FAILURES as error:
        certificate = failed(original, error)
    else:
        certificate = certify_ranks(contest, original, planned, progress)
    report = with_planned(report, planned, certificate)
    result = Result(report, original.profile, planned.profile if planned is not None else None)
    return _with_certificate(result, one, other, None, request, original)


def check_certificate(
    path: Path, *, timeout: float = 600.0, progress: Progress = lambda _: None
) -> tuple[bool, Result]:
    """Repeat a saved certificate; return True if it still holds, and the new one with the changes.

    Raises `UnreadableInput` for another file, and `UsageError` if its scripts are missing.
    """
    old = load_certificate(path)
    request = Request(steps=old.steps, warmup=old.warmup)
    one = _script_of(old.original, path.parent, old.device, timeout)
    if old.plan is not None:
        plan = replace(old.plan, script_sha256="")
        result = verify_report(one, plan, request, progress=progress)
    elif old.other is not None:
        other = _script_of(old.other, path.parent, old.device, timeout)
        result = verify_pair(one, other, request, progress=progress)
    else:
        raise UsageError(f"{path} names neither a plan nor a second script to compare with.")
    assert result.certificate is not None
    holds, notes = judged(old, result.certificate)
    report = replace(result.report, notes=(*notes, *result.report.notes))
    return holds, result._replace(report=report)


_FAILURES = (ScriptFailed, RuntimeError, ValueError, TypeError, LookupError, ArithmeticError)


def _with_certificate(
    result: Result,
    one: Workload,
    other: Workload | None,
    plan: Plan | None,
    request: Request,
    trial: Trial,
) -> Result:
    """Add the certificate as a file, except for live steps, which cannot be repeated."""
    certificate = result.report.certificate
    if certificate is None or not isinstance(one, Script):
        return result
    written = KeptCertificate(
        certificate=certificate,
        original=_program(one),
        other=_program(other) if isinstance(other, Script) else None,
        plan=plan,
        steps=request.steps,
        warmup=request.warmup,
        device=one.device,
        torchtrim=__version__,
        torch=str(torch.__version__),
        python=platform.python_version(),
        machine=machine(trial.device),
        made=datetime.now(UTC).date().isoformat(),
        results=results_of(trial),
        before=result.report.original,
        after=result.report.planned,
    )
    return result._replace(certificate=written)


def _program(script: Script) -> Program:
    return Program(
        target=script.target,
        args=script.args,
        module=script.module,
        sha256=sha256_of(script.path) if script.path is not None else "",
        processes=script.processes,
    )


def results_of(trial: Trial) -> str:
    """Return a digest of a trial's results, after the version of the method.

    It omits Python's own values, since a time among them would change it in every run.
    """
    digest = hashlib.sha256()
    for step in (step for one in trial.ranks or (trial,) for step in one.steps):
        for name, value in step.digests.items():
            if not name.startswith(KEPT_BY_PYTHON):
                digest.update(f"{name}={value};".encode())
    return f"{_RESULTS}{digest.hexdigest()[:32]}"


def _script_of(program: Program, folder: Path, device: str | None, timeout: float) -> Script:
    script = Script(program.target, program.args, program.module, device, timeout)
    script = script._replace(processes=program.processes)
    if script.path is None or script.path.is_file():
        return script
    near = folder / program.target
    if not near.is_file():
        raise UsageError(
            f"the script {program.target} of the certificate does not exist here. Run this in its folder."
        )
    return script._replace(target=str(near))


def judged(old: KeptCertificate, new: KeptCertificate) -> tuple[bool, tuple[str, ...]]:
    """Return a boolean, True for a verdict as strong as before, and lines on it and on each change."""
    then, now = old.certificate.verdict, new.certificate.verdict
    holds = _ORDER.index(now) <= _ORDER.index(then)
    said = "the certificate holds" if holds else "the certificate no longer holds"
    day = f"on {old.made}" if old.made else "then"
    return holds, (f"{said}: {then} {day}, {now} now", *_changes(old, new))


def _changes(old: KeptCertificate, new: KeptCertificate) -> Iterator[str]:
    pairs = [(old.original, new.original)]
    if old.other is not None and new.other is not None:
        pairs.append((old.other, new.other))
    for one, two in pairs:
        if one.sha256 != two.sha256:
            yield f"changed since: the text of {one.target}"
    for name in ("torchtrim", "torch", "python", "machine"):
        before, after = getattr(old, name), getattr(new, name)
        if before != after:
            yield f"changed since: {name}, {before or 'unknown'} then, {after} now"
    if not old.results.startswith(_RESULTS):
        yield "not known: whether the original computes the same bits, since its certificate is an older one"
    elif old.results != new.results:
        yield "changed since: the original's results, in some bit"
    if old.certificate.coverage != new.certificate.coverage:
        yield "changed since: the shapes, types, modes or steps that were compared"


OnDifference = Literal["stop", "revert"]


def run_checked(
    script: Script,
    plan: Plan | None,
    every: int,
    on_difference: OnDifference = "stop",
    report: RunReport | None = None,
) -> None:
    """Run the script planned, and check every `every`-th step.

    Before a step that differs, stop the run with `Diverged` and save its state, or revert the plan and
    continue. Raises `Unsupported` if steps cannot be checked.
    """
    if plan is None or not plan.techniques:
        raise UsageError(
            "--verify-every compares planned steps with original ones: give a plan that changes something, "
            f"as in: {command('run', '--plan', 'plan.toml', '--verify-every', str(every))}"
        )
    rounds = any(one.equivalence != "BITWISE" for one in plan.techniques)
    name = script.path.stem if script.path is not None else script.target
    differs: Callable[[Live, int, StepVerdict], None] = partial(_stop, name)
    if on_difference == "revert":
        differs = _revert
    judges = partial(judge, rounds=rounds), partial(judge_region, rounds=rounds)
    live = Live(plan, every, *judges, differs)
    try:
        run_planned(script, plan, live, report)
    finally:
        if live.alone:
            tell(_summary(live))


def _revert(live: Live, number: int, _: StepVerdict) -> None:
    live.take_back()
    when = f"after the backward of step {number}" if live.is_in_step else f"before step {number}"
    tell(f"the plan was reverted {when}, and the run goes on without it")


def _stop(name: str, live: Live, number: int, verdict: StepVerdict) -> None:
    path = Path.cwd() / f"{name}-before-step-{number}.pt"
    write_atomically(path, _saved(live, number - 1))
    when = "its update, after its forward wrote buffers" if live.is_in_step else "it"
    raise EndOfScript(
        Diverged(
            f"step {number} {verdict.reason}. The run was stopped before {when}: {path.name} has the state "
            f"of its models, optimizers and random generators after step {number - 1}, for torch.load. "
            "Continue from there without the plan, or with --on-difference revert."
        )
    )


def _saved(live: Live, steps: int) -> bytes:
    known = live.watcher.optimizers
    state: dict[str, Any] = {
        "steps": steps,
        "models": {name: root.state_dict() for name, root in live.modules.roots.items()},
        "optimizers": {
            name: one.state_dict() for name, one in zip(names_of(known), known, strict=True)
        },
        "random": {"torch": torch.get_rng_state(), "python": random.getstate()},
    }
    buffer = io.BytesIO()
    torch.save(state, buffer)
    return buffer.getvalue()


def _summary(live: Live) -> str:
    verdicts = [verdict for _, verdict in live.checked]
    if not verdicts:
        return "no step was checked: the run ended before the first check"
    equal = sum(verdict.found == "equal" for verdict in verdicts)
    most = max(verdict.bytes for verdict in verdicts)
    return (
        f"{equal} of {len(verdicts)} checked steps equal the original; that took {sum(live.seconds):.2f} s, "
        f"and at most {most / 2**20:.0f} MiB more"
    )
