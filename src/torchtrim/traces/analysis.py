"""Trace -> report: which waits there are, where, and what the whole would gain without them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from torchtrim import __version__
from torchtrim.costs.replay.bound import bound
from torchtrim.costs.replay.program import Does, ReplayProgram
from torchtrim.costs.replay.sets import Prices, price
from torchtrim.records.trace import Bound, TraceReport, TraceSet, TraceSite
from torchtrim.records.trace_events import Trace
from torchtrim.traces.build import build
from torchtrim.traces.busy import covered, device_busy, loading
from torchtrim.traces.lines import Sources
from torchtrim.traces.ranks import Talk, job_of
from torchtrim.traces.sites import Site, sites_of
from torchtrim.traces.waiting import Wait, find_waits, unexplained_copies


@dataclass(frozen=True, kw_only=True)
class Mend:
    """Sites whose path ends so, or which are in such a function or operator, and what fixes them."""

    path: str = ""
    function: str = ""
    within: str = ""
    package: str
    says: str
    source: str

    def fits(self, site: TraceSite) -> bool:
        """Whether the site is one of these."""
        return (
            self.path in site.path.replace("\\", "/")
            and self.function in (site.function, "")
            and self.within in (site.within, site.op, "")
        )


_OPTIMIZER = (
    "its step counter is on the device, as after loading a checkpoint, and is read for each parameter; "
    "newer Lightning keeps it on the host, capturable=True or fused=True does not read it"
)
MENDS = (
    Mend(
        path="diffusers/schedulers/",
        function="index_for_timestep",
        package="diffusers",
        says="pipelines that call scheduler.set_begin_index(0), as newer Flux does, do not search",
        source="https://github.com/huggingface/diffusers/pull/11696",
    ),
    Mend(
        path="transformers/modeling_attn_mask_utils.py",
        function="_ignore_causal_mask_sdpa",
        package="transformers",
        says="the attention mask is read back to choose a kernel; pass none where nothing is padded",
        source="https://github.com/huggingface/transformers/blob/v4.49.0/src/transformers/modeling_attn_mask_utils.py",
    ),
    Mend(
        path="owlv2/modeling_owlv2.py",
        function="box_predictor",
        package="transformers",
        says="a constant is moved to the device at every call; register it as a buffer",
        source="https://github.com/huggingface/transformers/blob/v4.49.0/src/transformers/models/owlv2/modeling_owlv2.py",
    ),
    *(
        Mend(
            within=f"Optimizer.step#{name}.step",
            package="torch",
            says=_OPTIMIZER,
            source="https://github.com/Lightning-AI/pytorch-lightning/issues/19955",
        )
        for name in ("Adam", "AdamW")
    ),
    Mend(
        within="aten::multinomial",
        package="torch",
        says="it reads its input back to check it; PyTorch counts that among the waits to be removed",
        source="https://github.com/pytorch/pytorch/issues/108968",
    ),
    Mend(
        within="aten::nonzero",
        package="torch",
        says="newer PyTorch has nonzero_static(size=) on CUDA, which does not wait",
        source="https://github.com/pytorch/pytorch/blob/main/aten/src/ATen/native/cuda/Nonzero.cu",
    ),
)


def mended(sites: Iterable[TraceSite], versions: Mapping[str, str]) -> list[str]:
    """What is known of these sites, with the version that the trace was recorded with, if it tells."""
    notes = []
    every = list(sites)
    for mend in MENDS:
        found = next((site for site in every if mend.fits(site)), None)
        if found is not None:
            where = found.function or found.within or found.op
            version = versions.get(mend.package, "")
            used = f"{mend.package} {version}".strip()
            notes.append(f"{where} ({used}): {mend.says}. {mend.source}")
    return notes


MOST_ERROR = 0.10  # Arbitrary; a replay that is further off its own trace is not believed.
_SHARE = 0.05  # Arbitrary; less of the trace does not change what is said.


def analyse(trace: Trace, source: Path | None = None) -> TraceReport:
    """Find and price the waits of one rank's trace. `source` is a folder in which lines are looked up."""
    waits = find_waits(trace)
    found = sites_of(trace, waits, Sources(folder=source) if source is not None else None)
    own = [wait for wait in waits if not wait.is_profiler]
    sites = [site for site in found if not site.is_device]
    devices = [site for site in found if site.is_device]
    program, prices, why = _replayed(trace, sites, devices)
    span = program.span if program is not None else trace.ended() - trace.started()
    records = _records([*sites, *devices], prices)
    host_waits = [wait.call for wait in own]
    return TraceReport(
        torchtrim=__version__,
        file=trace.source,
        rank=trace.rank,
        device=trace.device,
        versions=trace.versions,
        events=trace.events,
        steps=_steps(trace),
        sync_calls=sum(wait.is_sync and not wait.is_device for wait in own),
        blocking_copies=sum(wait.is_pageable for wait in own) + unexplained_copies(trace),
        span_ms=_ms(span),
        replay_ms=_ms(prices.base.span) if prices is not None else None,
        device_busy_ms=_ms(device_busy(trace)),
        host_waiting_ms=_ms(covered(host_waits)),
        sites=records[: len(sites)],
        sets=_sets(prices),
        bound=_bound(program, prices, trace),
        device_syncs=records[len(sites) :],
        profiler_syncs=len(waits) - len(own),
        loader_ms=_ms(loading(trace)),
        notes=(*why, *_notes(trace, program, prices, own, records), *trace.notes),
    )


def joined(reports: Sequence[TraceReport], talks: Sequence[Talk] = ()) -> TraceReport:
    """One report for several ranks: the slowest one's, with all of them in it, and their collectives."""
    if len(reports) == 1:
        return reports[0]
    slowest = max(reports, key=lambda report: report.span_ms)
    shared = f"{len(reports)} ranks; shown is the slowest, {_named(slowest)}."
    return msgspec.structs.replace(
        slowest,
        notes=(shared, *slowest.notes),
        ranks=tuple(sorted(reports, key=_by_rank)),
        job=job_of(talks) if talks else None,
    )


def _steps(trace: Trace) -> int:
    marks = (*trace.annotations, *trace.operators)
    return len({mark.name for mark in marks if mark.name.startswith("ProfilerStep#")})


def _by_rank(report: TraceReport) -> tuple[bool, int, str]:
    return (report.rank is None, report.rank or 0, report.file)


def _named(report: TraceReport) -> str:
    return f"rank {report.rank}" if report.rank is not None else Path(report.file).name


def _replayed(
    trace: Trace, sites: list[Site], devices: list[Site]
) -> tuple[ReplayProgram | None, Prices | None, list[str]]:
    if not trace.calls:
        return None, None, ["No calls of the runtime are in the trace, so it cannot be replayed."]
    numbers = {id(call): i for i, site in enumerate([*sites, *devices]) for call in site.calls}
    program = build(trace, numbers)
    if not any(step.launches and step.does is not Does.OUTSIDE for step in program.steps):
        return None, None, ["No call in the trace launched what ran; it cannot be replayed."]
    every = range(len(sites) + len(devices))
    prices = price(program, every[: len(sites)], apart=every[len(sites) :])
    error = prices.base.span / program.span - 1 if program.span else 0.0
    if abs(error) > MOST_ERROR:
        said = (
            f"The replay takes {prices.base.span / 1e3:.1f} ms where {program.span / 1e3:.1f} ms were "
            f"measured ({error:+.0%}), so it says nothing of what a wait costs."
        )
        return None, None, [said]
    return program, prices, []


def _records(sites: list[Site], prices: Prices | None) -> tuple[TraceSite, ...]:
    return tuple(_record(site, i, prices) for i, site in enumerate(sites))


def _record(site: Site, number: int, prices: Prices | None) -> TraceSite:
    frame = site.frame
    lines = tuple(sorted(site.lines))
    found = len(lines) == 1
    alone = prices.alone.get(number) if prices is not None else None
    return TraceSite(
        path=frame.path if frame else "",
        function=frame.function if frame else "",
        line=lines[0] if found else frame.line if frame else 0,
        op=site.op,
        count=site.stands,
        wait_ms=_ms(site.wait_ms * 1e3),
        saves_alone_ms=_ms(alone) if alone is not None else None,
        exact=found or (frame is not None and frame.exact),
        lines=() if found else lines,
        within=site.within,
        phase=site.phase,
    )


def _sets(prices: Prices | None) -> tuple[TraceSet, ...]:
    ranked = prices.sets if prices is not None else []
    return tuple(TraceSet(sites=tuple(sorted(s)), saves_ms=_ms(gain)) for s, gain in ranked)


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
    return notes + mended(records, trace.versions)


def _doubts(trace: Trace, program: ReplayProgram) -> list[str]:
    notes = []
    loose = [step for step in program.steps if step.does is Does.OUTSIDE]
    before = sum(activity.seconds for step in loose for activity in step.launches)
    if before > _SHARE * program.span:
        notes.append(
            f"{before / 1e3:.1f} ms of the device's work were launched before the trace began or by "
            "calls that it lacks; the replay keeps them where they were."
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


def _ms(microseconds: float) -> float:
    return round(microseconds / 1e3, 3)
