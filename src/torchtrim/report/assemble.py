"""Puts reports together from records. All reports of verbs that run something begin here."""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from torchtrim import __version__
from torchtrim.analysis.peak import holders
from torchtrim.analysis.peak_kinds import peak_parts
from torchtrim.analysis.timeline import by_kind, peak_operator
from torchtrim.errors import InfeasibleBudget
from torchtrim.records.budget import Budget
from torchtrim.records.certificate import Certificate
from torchtrim.records.finding import Finding
from torchtrim.records.job import ExchangePart, ExchangeRow, RankFigures
from torchtrim.records.lever import Part
from torchtrim.records.plan import Plan
from torchtrim.records.profile import Profile
from torchtrim.records.report import Figures, PlanSummary, Report, Stream, Waiting
from torchtrim.records.trial import Trial
from torchtrim.step.job import Exchange, Job, job_of


class Subject(NamedTuple):
    """What a report is of, and on what it was measured: the device, the machine, torch's version."""

    script: str
    project: str
    device: str
    machine: str
    torch: str


class Found(NamedTuple):
    """The findings of a profile, and what the waits among them cost."""

    findings: tuple[Finding, ...] = ()
    waiting: Waiting | None = None


def figures_of(trial: Trial) -> Figures:
    """The figures of a trial that has a profile."""
    assert trial.profile is not None
    times = [step.seconds for step in trial.timed]
    reserved = [step.reserved_bytes for step in trial.steps if step.reserved_bytes]
    return Figures(
        peak_bytes=trial.peak_bytes,
        tracked_peak_bytes=trial.profile.tracked_peak_bytes,
        reserved_bytes=max(reserved, default=None),
        rss_bytes=trial.rss_bytes,
        step_seconds=trial.seconds,
        spread_seconds=max(times) - min(times),
        by_kind=dict(by_kind(trial.profile, peak_operator(trial.profile)))
        if trial.profile.operators
        else {},
    )


def original_report(verb: str, subject: Subject, trial: Trial, found: Found) -> Report:
    """The original's figures, findings and what its peak is made of: what every other report begins with."""
    profile = trial.profile
    return Report(
        torchtrim=__version__,
        torch=subject.torch,
        verb=verb,
        device=subject.device,
        script=subject.script,
        project=subject.project,
        machine=subject.machine,
        steps=len(trial.timed),
        original=figures_of(trial) if profile is not None else None,
        findings=found.findings,
        waiting=found.waiting,
        holders=holders(profile) if profile is not None else (),
        peak_parts=_parts(profile),
        notes=trial.notes,
    )


def _parts(profile: Profile | None) -> tuple[Part, ...]:
    return peak_parts(profile) if profile is not None and profile.operators else ()


def with_plan(report: Report, plan: Plan, budget: Budget) -> Report:
    """The report with a plan and the budget that it is for."""
    return msgspec.structs.replace(
        report,
        budget_bytes=budget.bytes,
        memory_kind=budget.kind,
        plan=PlanSummary(
            techniques=plan.techniques,
            predicted=plan.predicted,
            status=plan.status,
            bound_seconds=plan.bound_seconds,
            gap=plan.gap,
        ),
    )


def with_planned(report: Report, planned: Trial | None, certificate: Certificate | None) -> Report:
    """The report with what the planned workload measured, and whether it equals the original."""
    measured = planned is not None and planned.profile is not None
    return msgspec.structs.replace(
        report,
        planned=figures_of(planned) if planned is not None and measured else None,
        certificate=certificate,
    )


def with_ranks(report: Report, original: Trial, planned: Trial | None = None) -> Report:
    """The report with each rank's figures, and what the ranks exchanged; as it is where there was one."""
    profiles = [trial.profile for trial in original.ranks if trial.profile is not None]
    if len(profiles) < 2:
        return report
    job = job_of(profiles)
    after = planned.ranks if planned is not None else ()
    ranks = tuple(
        _rank(job, number, trial, after[number] if number < len(after) else None)
        for number, trial in enumerate(original.ranks)
    )
    return msgspec.structs.replace(report, ranks=ranks, exchanges=tuple(map(_row, job.exchanges)))


def _rank(job: Job, number: int, original: Trial, planned: Trial | None) -> RankFigures:
    own = [
        (exchange, part)
        for exchange in job.exchanges
        for part in exchange.parts
        if part.rank == number
    ]
    return RankFigures(
        rank=number,
        original=figures_of(original) if original.profile is not None else None,
        planned=figures_of(planned) if planned is not None and planned.profile else None,
        collectives=len(own),
        exchanged_bytes=sum(exchange.bytes for exchange, _ in own),
        exchange_seconds=sum(part.end - part.start for _, part in own),
        blocked_seconds=sum(part.blocked for _, part in own),
        waited_seconds=sum(exchange.waited(part) for exchange, part in own),
    )


def _row(exchange: Exchange) -> ExchangeRow:
    return ExchangeRow(
        name=exchange.name,
        group=exchange.group,
        bytes=exchange.bytes,
        ranks=tuple(
            ExchangePart(
                rank=part.rank,
                start=part.start,
                seconds=part.end - part.start,
                blocked_seconds=part.blocked,
            )
            for part in exchange.parts
        ),
    )


def with_missed_budget(
    report: Report,
    error: InfeasibleBudget,
    budget: Budget,
    floor: Profile | None = None,
) -> Report:
    """The report of a budget that no plan meets. `floor`: the profile of the plan that needs least."""
    return msgspec.structs.replace(
        report,
        budget_bytes=budget.bytes,
        floor_bytes=error.smallest_bytes,
        memory_kind=budget.kind,
        peak_parts=_parts(floor) or report.peak_parts,
        levers=error.levers,
        notes=(str(error), *report.notes),
    )


def stream_report(
    verb: str,
    subject: Subject,
    stream: Stream,
    findings: tuple[Finding, ...],
    notes: tuple[str, ...],
) -> Report:
    """The report of a stream."""
    return Report(
        torchtrim=__version__,
        torch=subject.torch,
        verb=verb,
        device=subject.device,
        script=subject.script,
        project=subject.project,
        machine=subject.machine,
        steps=stream.frames,
        findings=findings,
        notes=notes,
        stream=stream,
    )


def lint_report(
    paths: tuple[str, ...],
    project: str,
    torch: str,
    findings: tuple[Finding, ...],
    notes: tuple[str, ...],
) -> Report:
    """The report of source that was only read."""
    return Report(
        torchtrim=__version__,
        torch=torch,
        verb="lint",
        device="",
        script=", ".join(paths),
        steps=0,
        project=project,
        findings=findings,
        notes=notes,
    )
