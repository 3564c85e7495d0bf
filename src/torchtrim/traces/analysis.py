"""Trace -> report: the syncs, their sites, and their prices."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from torchtrim import __version__
from torchtrim.costs.replay import Does, Prices, ReplayProgram, bound, price
from torchtrim.records.trace import Bound, Trace, TraceReport, TraceSet, TraceSite
from torchtrim.traces.build import build
from torchtrim.traces.ranks import Talk, covered, device_busy, in_ms, job_of, loading
from torchtrim.traces.sites import SourceFolder, SyncSite, sites_of
from torchtrim.traces.waiting import Wait, find_waits, unexplained_copies


@dataclass(frozen=True, kw_only=True)
class KnownFix:
    """A known fix for sites, matched by the end of their path, or by function or operator."""

    path: str = ""
    function: str = ""
    within: str = ""
    package: str
    says: str
    source: str

    def fits(self, site: TraceSite) -> bool:
        """Return True if the fix applies to the site."""
        return (
            self.path in site.path.replace("\\", "/")
            and self.function in (site.function, "")
            and self.within in (site.within, site.op, "")
        )


_OPTIMIZER = (
    "its step counter is on the device, as after loading a checkpoint, and is read for each parameter; "
    "newer Lightning keeps it on the host, capturable=True or fused=True does not read it"
)
KNOWN_FIXES = (
    KnownFix(
        path="diffusers/schedulers/",
        function="index_for_timestep",
        package="diffusers",
        says="pipelines that call scheduler.set_begin_index(0), as newer Flux does, do not search",
        source="https://github.com/huggingface/diffusers/pull/11696",
    ),
    KnownFix(
        path="transformers/modeling_attn_mask_utils.py",
        function="_ignore_causal_mask_sdpa",
        package="transformers",
        says="the attention mask is read back to choose a kernel; pass None for batches without padding",
        source="https://github.com/huggingface/transformers/blob/v4.49.0/src/transformers/modeling_attn_mask_utils.py",
    ),
    KnownFix(
        path="owlv2/modeling_owlv2.py",
        function="box_predictor",
        package="transformers",
        says="a constant is moved to the device at every call; register it as a buffer",
        source="https://github.com/huggingface/transformers/blob/v4.49.0/src/transformers/models/owlv2/modeling_owlv2.py",
    ),
    *(
        KnownFix(
            within=f"Optimizer.step#{name}.step",
            package="torch",
            says=_OPTIMIZER,
            source="https://github.com/Lightning-AI/pytorch-lightning/issues/19955",
        )
        for name in ("Adam", "AdamW")
    ),
    KnownFix(
        within="aten::multinomial",
        package="torch",
        says="it reads its input back to check it; PyTorch counts that among the waits to be removed",
        source="https://github.com/pytorch/pytorch/issues/108968",
    ),
    KnownFix(
        within="aten::nonzero",
        package="torch",
        says="newer PyTorch has nonzero_static(size=) on CUDA, which does not wait",
        source="https://github.com/pytorch/pytorch/blob/main/aten/src/ATen/native/cuda/Nonzero.cu",
    ),
)


def known_fixes(sites: Iterable[TraceSite], versions: Mapping[str, str]) -> list[str]:
    """Return the known fixes of these sites, with the trace's PyTorch version, if recorded."""
    notes = []
    sites = list(sites)
    for fix in KNOWN_FIXES:
        site = next((site for site in sites if fix.fits(site)), None)
        if site is not None:
            where = site.function or site.within or site.op
            used = f"{fix.package} {versions.get(fix.package, '')}".strip()
            notes.append(f"{where} ({used}): {fix.says}. {fix.source}")
    return notes


MOST_ERROR = 0.10  # Arbitrary; a replay that differs more from its own trace proves nothing.
_SHARE = 0.05  # Arbitrary; less of the trace is not worth a note.


def analyse(trace: Trace, source: Path | None = None) -> TraceReport:
    """Find and price the syncs of one rank's trace. `source` is the folder with the source files."""
    waits = find_waits(trace)
    ranked = sites_of(trace, waits, SourceFolder(folder=source) if source is not None else None)
    own = [wait for wait in waits if not wait.is_profiler]
    sites = [site for site in ranked if not site.is_device]
    devices = [site for site in ranked if site.is_device]
    program, prices, why = _replayed(trace, sites, devices)
    span = program.span if program is not None else trace.ended() - trace.started()
    records = tuple(_record(site, i, prices) for i, site in enumerate([*sites, *devices]))
    marks = (mark.name for mark in (*trace.annotations, *trace.operators))
    sets = prices.sets if prices is not None else []
    return TraceReport(
        torchtrim=__version__,
        file=trace.source,
        rank=trace.rank,
        device=trace.device,
        versions=trace.versions,
        events=trace.events,
        steps=len({name for name in marks if name.startswith("ProfilerStep#")}),
        sync_calls=sum(wait.is_sync and not wait.is_device for wait in own),
        blocking_copies=sum(wait.is_pageable for wait in own) + unexplained_copies(trace),
        span_ms=in_ms(span),
        replay_ms=in_ms(prices.base.span) if prices is not None else None,
        device_busy_ms=in_ms(device_busy(trace)),
        host_waiting_ms=in_ms(covered(wait.call for wait in own)),
        sites=records[: len(sites)],
        sets=tuple(TraceSet(sites=tuple(sorted(s)), saves_ms=in_ms(gain)) for s, gain in sets),
        bound=_bound(program, prices, trace),
        device_syncs=records[len(sites) :],
        profiler_syncs=len(waits) - len(own),
        loader_ms=in_ms(loading(trace)),
        notes=(*why, *_notes(trace, program, prices, own, records), *trace.notes),
    )


def joined(reports: Sequence[TraceReport], talks: Sequence[Talk] = ()) -> TraceReport:
    """Merge the reports of several ranks: the slowest rank's, with all ranks and their collectives."""
    if len(reports) == 1:
        return reports[0]
    slowest = max(reports, key=lambda report: report.span_ms)
    name = f"rank {slowest.rank}" if slowest.rank is not None else Path(slowest.file).name
    shared = f"{len(reports)} ranks; shown is the slowest, {name}."
    return msgspec.structs.replace(
        slowest,
        notes=(shared, *slowest.notes),
        ranks=tuple(sorted(reports, key=_by_rank)),
        job=job_of(talks) if talks else None,
    )


def _by_rank(report: TraceReport) -> tuple[bool, int, str]:
    return (report.rank is None, report.rank or 0, report.file)


def _replayed(
    trace: Trace, sites: list[SyncSite], devices: list[SyncSite]
) -> tuple[ReplayProgram | None, Prices | None, list[str]]:
    if not trace.calls:
        return None, None, ["The trace has no runtime calls, so it cannot be replayed."]
    numbers = {id(call): i for i, site in enumerate([*sites, *devices]) for call in site.calls}
    program = build(trace, numbers)
    if not any(step.launches and step.does is not Does.OUTSIDE for step in program.steps):
        return None, None, ["The work in the trace has no launching calls; it cannot be replayed."]
    every = range(len(sites) + len(devices))
    prices = price(program, every[: len(sites)], apart=every[len(sites) :])
    error = prices.base.span / program.span - 1 if program.span else 0.0
    if abs(error) > MOST_ERROR:
        doubt = (
            f"The replay takes {prices.base.span / 1e3:.1f} ms where {program.span / 1e3:.1f} ms were "
            f"measured ({error:+.0%}), so it does not show the cost of a wait."
        )
        return None, None, [doubt]
    return program, prices, []


def _record(site: SyncSite, number: int, prices: Prices | None) -> TraceSite:
    frame = site.frame
    lines = tuple(sorted(site.lines))
    single = len(lines) == 1
    alone = prices.alone.get(number) if prices is not None else None
    return TraceSite(
        path=frame.path if frame else "",
        function=frame.function if frame else "",
        line=lines[0] if single else frame.line if frame else 0,
        op=site.op,
        count=site.stands,
        wait_ms=in_ms(site.wait_ms * 1e3),
        saves_alone_ms=in_ms(alone) if alone is not None else None,
        exact=single or (frame is not None and frame.exact),
        lines=() if single else lines,
        within=site.within,
        phase=site.phase,
    )


def _bound(program: ReplayProgram | None, prices: Prices | None, trace: Trace) -> Bound:
    if program is None or prices is None:
        return "unknown"
    span = prices.base.span
    return bound(program, gained=prices.together, span=span, loading=loading(trace))


def _notes(
    trace: Trace,
    program: ReplayProgram | None,
    prices: Prices | None,
    waits: list[Wait],
    records: tuple[TraceSite, ...],
) -> list[str]:
    notes = []
    if waits and not any(record.path for record in records):
        notes.append("The trace has no stacks: profile with with_stack=True to see source lines.")
    if prices is not None and prices.unpriced:
        notes.append(f"{prices.unpriced} sites were not priced alone; the trace is long.")
    if program is not None:
        notes += _doubts(trace, program)
    return notes + known_fixes(records, trace.versions)


def _doubts(trace: Trace, program: ReplayProgram) -> list[str]:
    notes = []
    loose = [step for step in program.steps if step.does is Does.OUTSIDE]
    before = sum(activity.seconds for step in loose for activity in step.launches)
    if before > _SHARE * program.span:
        notes.append(
            f"{before / 1e3:.1f} ms of the device's work were launched before the trace began or by "
            "calls that it lacks; the replay keeps them at their recorded times."
        )
    delayed = sum(a.extra for step in program.steps for a in step.launches)
    delayed += sum(step.outside for step in program.steps)
    if delayed > _SHARE * program.span:
        notes.append(
            f"{delayed / 1e3:.1f} ms of waiting have no cause in the trace, such as kernels that were not "
            "recorded or other processes; the replay keeps them."
        )
    talk = covered(e for e in trace.activities if e.name.lower().startswith(("nccl", "rccl")))
    if talk > _SHARE * program.span:
        notes.append(
            f"Collectives run for {talk / 1e3:.1f} ms; the replay keeps their time, though it also holds "
            "the delay of other ranks."
        )
    return notes
