"""A certificate that was kept, repeated: whether it still holds, and what has changed since."""

from __future__ import annotations

import hashlib
import platform
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

import msgspec
import torch

from torchtrim import __version__
from torchtrim.certify.certify import KEPT_BY_PYTHON
from torchtrim.errors import UsageError
from torchtrim.executor.fingerprint import sha256_of
from torchtrim.records.certificate import Verdict
from torchtrim.records.kept_certificate import KeptCertificate, Program
from torchtrim.records.plan import Plan
from torchtrim.records.report import Result
from torchtrim.records.trial import Request, Trial
from torchtrim.runner.process.machine import machine
from torchtrim.runner.script import Script
from torchtrim.runner.trials import Workload

_RESULTS = "2:"
_ORDER: tuple[Verdict, ...] = (
    *("BITWISE", "ROUNDING", "AS ASKED"),
    *("UNDECIDED", "NOT EQUAL"),
)


class Compared(NamedTuple):
    """What a certificate was made of."""

    original: Workload
    other: Workload | None
    plan: Plan | None
    request: Request


def kept(result: Result, compared: Compared, trial: Trial) -> Result:
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
