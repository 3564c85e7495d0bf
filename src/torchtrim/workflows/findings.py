"""Findings on an original that ran, and the report that begins with them."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterable
from pathlib import Path

import torch
from msgspec.structs import replace

from torchtrim.analysis.peak import library_note
from torchtrim.analysis.prices import priced
from torchtrim.analysis.syncs import CODES, unknown_note
from torchtrim.analysis.user_source import SourceLines as Lines
from torchtrim.capture.build import untested
from torchtrim.costs.devices import guess_note
from torchtrim.errors import UnreadableInput
from torchtrim.records.finding import Finding, Suggestion
from torchtrim.records.profile import Profile
from torchtrim.records.report import Report
from torchtrim.records.trial import Trial
from torchtrim.report.assemble import PricedFindings, Subject, original_report, with_ranks
from torchtrim.rewriter.advice import advice_at, advice_for
from torchtrim.rules.registry import diagnose, diagnose_ranks, in_order
from torchtrim.runner.script import Script
from torchtrim.runner.trials import Workload
from torchtrim.source.source import SourceFile, read_source

_OF_TIME = ("TT601", "TT602", "TT606")
_STILL = 1.2  # of the slowest rank's quickest step: above its usual spread


def report_of(verb: str, workload: Workload, trial: Trial) -> Report:
    """Return the report of an original that ran."""
    profile, priced_findings = trial.profile, PricedFindings()
    said = [untested(str(torch.__version__))]
    if profile is not None:
        priced_findings = _on_ranks(trial, profile) if trial.ranks else _in_one(profile)
        said += [unknown_note(profile), library_note(profile), guess_note(profile.device)]
    subject = subject_of(workload, trial.device)
    report = with_ranks(original_report(verb, subject, trial, priced_findings), trial)
    return replace(report, notes=(*report.notes, *filter(None, said)))


def _in_one(profile: Profile) -> PricedFindings:
    findings, waiting = priced(profile, diagnose(profile))
    return PricedFindings(with_settings(findings, profile.project), waiting)


def _on_ranks(trial: Trial, lead: Profile) -> PricedFindings:
    """Return the findings of the largest rank, further ones of other ranks, and those across ranks.

    A wait longer than a whole step without the recorder occurs in the recorded step alone, and is dropped.
    """
    findings, waiting = priced(lead, diagnose(lead, alone=False))
    others = [one for one in ranks_of(trial) if one.rank != lead.rank]
    longest = _STILL * max(min(step.seconds for step in one.timed) for one in trial.ranks)
    together = [
        one
        for one in diagnose_ranks((lead, *others))
        if one.code not in _OF_TIME or (one.price_ms or 0) <= longest * 1e3
    ]
    every = (*findings, *together)
    ordered = in_order(lead, every) if waiting is None else every
    return PricedFindings(with_settings(ordered, lead.project), waiting)


def ranks_of(trial: Trial) -> tuple[Profile, ...]:
    """Return the profiles of all ranks, empty for a single process."""
    return tuple(one.profile for one in trial.ranks if one.profile is not None)


def subject_of(workload: Workload, device: str) -> Subject:
    """Return the subject of a report on a workload."""
    script = workload if isinstance(workload, Script) else None
    model = None if isinstance(workload, Script) else workload.model
    return Subject(
        script=script.target if script else type(model).__name__,
        project=str(script.project if script else Path.cwd()),
        device=device,
        machine=machine(device),
        torch=str(torch.__version__),
    )


def with_settings(findings: Iterable[Finding], project: str) -> tuple[Finding, ...]:
    """Add library settings to findings of waits that they would eliminate, with the line to write."""
    known = _Settings(project)
    return tuple(
        known.settle(one) if one.code in CODES and one.fix and one.fix.kind == "advice" else one
        for one in findings
    )


class _Settings:
    """Finder of library settings, which reads each user file once."""

    def __init__(self, project: str) -> None:
        self._project = project
        self._lines = Lines(project)
        self._sources: dict[str, SourceFile | None] = {}

    def settle(self, finding: Finding) -> Finding:
        function = self._lines.function(finding.path, finding.line).rpartition(".")[2]
        advice = advice_for(finding.path, function)
        if advice is None and (source := self._source(finding.path)) is not None:
            advice = advice_at(source, finding.line)
        if advice is None:
            return finding
        fix = Suggestion(kind="config", reason=f"{advice.why}. Write: {advice.line}")
        return replace(finding, fix=fix)

    def _source(self, path: str) -> SourceFile | None:
        if path not in self._sources:
            try:
                text, _ = read_source(Path(self._project, path))
                self._sources[path] = SourceFile(path, text)
            except UnreadableInput:
                self._sources[path] = None
        return self._sources[path]


def machine(device: str) -> str:
    """Describe the processor, its threads and, if used, the GPU."""
    facts = [platform.system(), platform.machine(), f"{os.cpu_count()} cores"]
    facts.append(f"{torch.get_num_threads()} torch threads")
    if device.startswith("cuda") and torch.cuda.is_available():
        facts.append(torch.cuda.get_device_name(device))
    return ", ".join(facts)
