"""Assembles reports from records. Every report of a verb that runs something starts here."""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from torchtrim import __version__
from torchtrim.analysis.peak import holders, peak_parts
from torchtrim.analysis.timeline import by_kind, peak_operator
from torchtrim.errors import InfeasibleBudget
from torchtrim.records.budget import Budget
from torchtrim.records.certificate import Certificate
from torchtrim.records.figures import ExchangePart, ExchangeRow, PeakPart, RankFigures
from torchtrim.records.finding import Finding
from torchtrim.records.plan import Plan
from torchtrim.records.profile import Profile
from torchtrim.records.report import Figures, PlanSummary, Report, StreamReport, WaitCost
from torchtrim.records.trial import Trial
from torchtrim.report.plan_words import words_of
from torchtrim.step.job import Job, JobCollective, job_of


class Subject(NamedTuple):
    """The subject of a report: the script, and the device, machine and torch version it ran on."""

    script: str
    project: str
    device: str
    machine: str
    torch: str


class PricedFindings(NamedTuple):
    """The findings of a profile, and the cost of the waits among them."""

    findings: tuple[Finding, ...] = ()
    waiting: WaitCost | None = None


def figures_of(trial: Trial) -> Figures:
    """Return the figures of a trial; without a profile, as of compiled graphs, those of its steps alone."""
    profile = trial.profile
    times = [step.seconds for step in trial.timed]
    reserved = [step.reserved_bytes for step in trial.steps if step.reserved_bytes]
    return Figures(
        peak_bytes=trial.peak_bytes,
        tracked_peak_bytes=profile.tracked_peak_bytes if profile else 0,
        reserved_bytes=max(reserved, default=None),
        rss_bytes=trial.rss_bytes,
        step_seconds=trial.seconds,
        spread_seconds=max(times) - min(times),
        by_kind=dict(by_kind(profile, peak_operator(profile)))
        if profile is not None and profile.operators
        else {},
    )


def _figures_if_recorded(trial: Trial | None) -> Figures | None:
    recorded = trial is not None and (trial.profile is not None or trial.request.compiles)
    return figures_of(trial) if trial is not None and recorded else None


def original_report(verb: str, subject: Subject, trial: Trial, found: PricedFindings) -> Report:
    """Return the report on the original: its figures, findings and parts of the peak. Others extend it."""
    profile = trial.profile
    return msgspec.structs.replace(
        _bare_report(verb, subject, len(trial.timed)),
        original=_figures_if_recorded(trial),
        findings=found.findings,
        waiting=found.waiting,
        holders=holders(profile) if profile is not None else (),
        peak_parts=_parts(profile),
        notes=trial.notes,
    )


def _bare_report(verb: str, subject: Subject, steps: int) -> Report:
    return Report(
        torchtrim=__version__,
        torch=subject.torch,
        verb=verb,
        device=subject.device,
        script=subject.script,
        project=subject.project,
        machine=subject.machine,
        steps=steps,
    )


def _parts(profile: Profile | None) -> tuple[PeakPart, ...]:
    return peak_parts(profile) if profile is not None and profile.operators else ()


def with_plan(report: Report, plan: Plan, budget: Budget, profile: Profile | None = None) -> Report:
    """Add a plan and its budget to the report. `profile`: the one that the plan was made for."""
    types = {module.path: module.type for module in profile.modules} if profile else {}
    summary = PlanSummary(
        techniques=plan.techniques,
        predicted=plan.predicted,
        status=plan.status,
        bound_seconds=plan.bound_seconds,
        gap=plan.gap,
        words=tuple(words_of(one, types) for one in plan.techniques),
        graphs=len(plan.compiled),
    )
    return msgspec.structs.replace(
        report, budget_bytes=budget.bytes, memory_kind=budget.kind, plan=summary
    )


def with_planned(report: Report, planned: Trial | None, certificate: Certificate | None) -> Report:
    """Add the figures of the planned workload and its certificate to the report."""
    figures = _figures_if_recorded(planned)
    return msgspec.structs.replace(report, planned=figures, certificate=certificate)


def with_ranks(report: Report, original: Trial, planned: Trial | None = None) -> Report:
    """Add the figures of each rank and their collectives to the report, if there are several ranks."""
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
    own = [(e, part) for e in job.exchanges for part in e.parts if part.rank == number]
    return RankFigures(
        rank=number,
        original=_figures_if_recorded(original),
        planned=_figures_if_recorded(planned),
        collectives=len(own),
        exchanged_bytes=sum(exchange.bytes for exchange, _ in own),
        exchange_seconds=sum(part.end - part.start for _, part in own),
        blocked_seconds=sum(part.blocked for _, part in own),
        waited_seconds=sum(exchange.waited(part) for exchange, part in own),
    )


def _row(exchange: JobCollective) -> ExchangeRow:
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
    report: Report, error: InfeasibleBudget, budget: Budget, floor: Profile | None = None
) -> Report:
    """Report a missed budget. `floor`: the profile of the plan with the smallest peak."""
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
    stream: StreamReport,
    findings: tuple[Finding, ...],
    notes: tuple[str, ...],
) -> Report:
    """Return the report of a stream."""
    bare = _bare_report(verb, subject, stream.frames)
    return msgspec.structs.replace(bare, findings=findings, notes=notes, stream=stream)


def lint_report(
    paths: tuple[str, ...],
    project: str,
    torch: str,
    findings: tuple[Finding, ...],
    notes: tuple[str, ...],
) -> Report:
    """Return the report of linting source, which does not run it."""
    subject = Subject(", ".join(paths), project, device="", machine="", torch=torch)
    return msgspec.structs.replace(_bare_report("lint", subject, 0), findings=findings, notes=notes)
