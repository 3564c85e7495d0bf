"""Whether a planned script, or another one, computes the same."""

from __future__ import annotations

import hashlib
import io
import platform
import random
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

import msgspec
import torch

from torchtrim import __version__
from torchtrim.capture.optimizers import names_of
from torchtrim.capture.workload import TrainStep
from torchtrim.certify.certify import KEPT_BY_PYTHON, Contest, failed
from torchtrim.certify.variants import certify_ranks, judge
from torchtrim.errors import Diverged, ScriptFailed, UsageError
from torchtrim.executor.apply import sha256_of
from torchtrim.records.certificate import KeptCertificate, Program, Verdict, load_certificate
from torchtrim.records.files import write_atomically
from torchtrim.records.plan import Plan
from torchtrim.records.report import Result
from torchtrim.records.trial import Request, Trial
from torchtrim.report.assemble import with_plan, with_planned
from torchtrim.runner.live import Live, StepVerdict, tell
from torchtrim.runner.planned_script import EndOfScript, check_script, run_planned
from torchtrim.runner.script import Script, working_folder
from torchtrim.runner.trials import Progress, Workload, run_trial
from torchtrim.workflows.findings import machine, report_of
from torchtrim.workflows.optimize.fitting import Fitting
from torchtrim.workflows.pipeline import verify_pipeline
from torchtrim.workflows.serve import is_of_calls

_RESULTS = "2:"
_ORDER: tuple[Verdict, ...] = (
    *("BITWISE", "ROUNDING", "AS ASKED"),
    *("UNDECIDED", "NOT EQUAL"),
)


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
    return kept(result, CertificateInputs(workload, None, plan, request), original)


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
    return kept(result, CertificateInputs(one, other, None, request), original)


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


class CertificateInputs(NamedTuple):
    """What a certificate was made of."""

    original: Workload
    other: Workload | None
    plan: Plan | None
    request: Request


def kept(result: Result, compared: CertificateInputs, trial: Trial) -> Result:
    """The result with its certificate as a file; that of live steps cannot be repeated, and has none."""
    one, other = compared.original, compared.other
    certificate = result.report.certificate
    if certificate is None or not isinstance(one, Script):
        return result
    written = KeptCertificate(
        certificate=certificate,
        original=_program(one),
        other=_program(other) if isinstance(other, Script) else None,
        plan=compared.plan,
        steps=compared.request.steps,
        warmup=compared.request.warmup,
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
    path = script.path
    digest = sha256_of(path) if path is not None else ""
    return Program(
        target=script.target,
        args=script.args,
        module=script.module,
        sha256=digest,
        processes=script.processes,
    )


def results_of(trial: Trial) -> str:
    """A digest of all that a trial computed, after the way in which it was made.

    What Python keeps is not in it, since a time among it would change it in every run.
    """
    digest = hashlib.sha256()
    for step in (step for one in trial.ranks or (trial,) for step in one.steps):
        for name, value in step.digests.items():
            if not name.startswith(KEPT_BY_PYTHON):
                digest.update(f"{name}={value};".encode())
    return f"{_RESULTS}{digest.hexdigest()[:32]}"


def script_of(program: Program, folder: Path, device: str | None, timeout: float) -> Script:
    """The program, looked for where it was named, then beside the certificate. Raises `UsageError`."""
    script = Script(program.target, program.args, program.module, device, timeout)
    script = script._replace(processes=program.processes)
    if script.path is None or script.path.is_file():
        return script
    near = folder / program.target
    if not near.is_file():
        raise UsageError(
            f"there is no script {program.target}, of which the certificate is. Run this where the script is."
        )
    return script._replace(target=str(near))


def judged(old: KeptCertificate, new: KeptCertificate) -> tuple[bool, tuple[str, ...]]:
    """Whether the verdict is as strong as it was, and a line for that and for each thing that changed."""
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
        yield "changed since: what the original computes, in some bit"
    if old.certificate.coverage != new.certificate.coverage:
        yield "changed since: the shapes, types, modes or steps that were compared"


def with_notes(result: Result, notes: tuple[str, ...]) -> Result:
    """The result with more notes in its report."""
    report = msgspec.structs.replace(result.report, notes=(*notes, *result.report.notes))
    return result._replace(report=report)


OnDifference = Literal["stop", "revert"]
Differs = Callable[[Live, int, StepVerdict], None]


def run_checked(
    script: Script, plan: Plan | None, every: int, on_difference: OnDifference = "stop"
) -> None:
    """Run the script planned, and check each step whose number is a multiple of `every`.

    A step that differs stops the run before it, with a `Diverged` and all that was trained in a file; or the
    plan is reverted before it, and the run goes on. Raises `Unsupported` where steps cannot be checked.
    """
    if plan is None or not plan.techniques:
        raise UsageError(
            "--verify-every compares planned steps with original ones: give a plan that changes something, "
            "as in `torchtrim run SCRIPT --plan plan.toml --verify-every 1000`."
        )
    rounds = any(one.equivalence != "BITWISE" for one in plan.techniques)
    name = script.path.stem if script.path is not None else script.target
    differs: Differs = _revert if on_difference == "revert" else partial(_stop, name)
    live = Live(plan, every, partial(judge, rounds=rounds), differs)
    try:
        run_planned(script, plan, live)
    finally:
        if live.alone:
            tell(_summary(live))


def _revert(live: Live, number: int, _: StepVerdict) -> None:
    live.take_back()
    tell(f"the plan was reverted before step {number}, and the run goes on without it")


def _stop(name: str, live: Live, number: int, verdict: StepVerdict) -> None:
    path = Path.cwd() / f"{name}-before-step-{number}.pt"
    write_atomically(path, _saved(live, number - 1))
    raise EndOfScript(
        Diverged(
            f"step {number} {verdict.reason}. The run was stopped before it, and nothing of it is lost: "
            f"{path.name} has the state of its models, optimizers and random generators after step "
            f"{number - 1}, as torch.load reads it. Go on from there without the plan, or with "
            "--on-difference revert."
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
    found = [verdict.found for _, verdict in live.checked]
    if not found:
        return "no step was checked: the run ended before the first that was to be"
    said = f"{found.count('equal')} of {len(found)} steps that were looked at equal the original"
    most = max(verdict.bytes for _, verdict in live.checked)
    return (
        f"{said}; that took {sum(live.seconds):.2f} s, and at most {most / 2**20:.0f} MiB besides"
    )
