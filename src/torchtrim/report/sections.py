"""The sections of a report as labelled sentences and rows of figures, shared by all renderers."""

from __future__ import annotations

from dataclasses import dataclass

from torchtrim.core.units import counted, format_bytes, format_seconds
from torchtrim.records import Report
from torchtrim.records.estimate import GrowthLimit
from torchtrim.records.figures import RankFigures
from torchtrim.records.loader import LoaderSettings
from torchtrim.records.profile import is_emulated
from torchtrim.records.sharding import ShardedModel
from torchtrim.report import facts, plan_words
from torchtrim.report.blocks import Items
from torchtrim.report.facts import (
    PEAKS,
    known,
    over_budget,
    peak_after,
    peak_before,
    step_name,
)


def sentences(report: Report) -> dict[str, Items]:
    """Return the sections that consist of sentences, by label."""
    proof = facts.certificate_lines(report.certificate) if report.certificate else ()
    parts = (
        Items("smallest is", "Parts of the smallest peak", facts.part_lines(report)),
        Items("fits with", "What meets the budget", facts.fitting_lines(report)),
        Items("levers", "Peaks that techniques would reach", facts.lever_lines(report)),
        Items("fixes", "Fixes", facts.fix_lines(report)),
        Items("ranks", "Ranks", rank_lines(report)),
        Items("plan", "Plan", plan_words.plan_lines(report)),
        Items("places", "Places of the plan", plan_words.place_lines(report)),
        Items("certificate", "Certificate", proof),
        Items("estimate", "Estimate", estimate_lines(report)),
        Items("loader", "Loader", tuned_lines(report)),
        Items("waits", "Waits", facts.waiting_lines(report)),
        Items("note", "Notes", report.notes),
    )
    return {part.label: part for part in parts}


def rank_lines(report: Report) -> list[str]:
    """Return a line for each rank of a job with its peak and its collectives."""
    timed = not is_emulated(report.device)
    return [_rank_line(rank, timed) for rank in report.ranks]


def _rank_line(rank: RankFigures, timed: bool) -> str:
    before = format_bytes(rank.original.peak_bytes) if rank.original else "unknown"
    after = f" -> {format_bytes(rank.planned.peak_bytes)}" if rank.planned else ""
    line = f"rank {rank.rank}: peak {before}{after}"
    if rank.collectives:
        count = counted(rank.collectives, "collective")
        line += f", {count} of {format_bytes(rank.exchanged_bytes)}"
    if rank.collectives and timed:
        line += f", blocked by them {format_seconds(rank.blocked_seconds)}"
        line += f", {format_seconds(rank.waited_seconds)} of it for a later rank"
    return line


def estimate_lines(report: Report) -> list[str]:
    """Return lines on an estimate: exact bytes, the effect of recomputation, and the largest batch."""
    estimate = report.estimated
    if estimate is None:
        return []
    exact = (
        ("parameters", estimate.parameter_bytes),
        ("gradients", estimate.gradient_bytes),
        ("optimizer state", estimate.optimizer_bytes),
    )
    lines = [", ".join(f"{name} {format_bytes(size)}" for name, size in exact if size)]
    if estimate.sharded is not None:
        lines.insert(0, _sharded_line(estimate.sharded))
    if estimate.workspace_bytes:
        lines.append(
            f"beside the peak {format_bytes(estimate.workspace_bytes)} of workspaces for cuBLAS, which a "
            "budget counts too; the CUDA context is not known"
        )
    if reserved := _reserved_line(report):
        lines.append(reserved)
    if estimate.recomputed_bytes is not None:
        places = ", ".join(plan_words.runs(estimate.recomputed))
        lines.append(
            f"with recomputation, predicted to need {format_bytes(estimate.recomputed_bytes)}: {places}"
        )
    return [line for line in (*lines, *map(_growth_line, estimate.growth)) if line]


def _reserved_line(report: Report) -> str:
    """Say what the caching allocator holds beside the allocated peak, and whether it fits the budget."""
    reserved = report.original.reserved_bytes if report.original else None
    if reserved is None or report.memory_kind == "reserved":
        return ""
    line = f"torch's allocator reserves {format_bytes(reserved)}, with blocks it keeps for reuse"
    if (
        report.budget_bytes is not None
        and over_budget(report) <= 0 < reserved - report.budget_bytes
    ):
        return f"{line}: over the budget (--memory-kind reserved limits it)"
    return f"{line} (--memory-kind reserved limits that)"


def _sharded_line(sharded: ShardedModel) -> str:
    """Return `"the first of 8 ranks, fully_shard on 32 blocks (Net.layers.0-31) and on the rest"`."""
    first = f"the first of {counted(sharded.ranks, 'rank')}"
    options = sharded.options
    if options is None:
        return first
    blocks = "the whole model: no block repeats (--fsdp-blocks PATTERN)"
    if sharded.blocks:
        some = ", ".join(plan_words.runs(sharded.blocks))
        blocks = f"{counted(len(sharded.blocks), 'block')} ({some}) and on the rest"
    words = [f"{first}, fully_shard on {blocks}"]
    if not options.reshard:
        words.append("blocks stay gathered until backward")
    if options.compute:
        words.append(f"computed in {options.compute}, gradients reduced in float32")
    if options.offload:
        words.append("shards and optimizer state on the host")
    return "; ".join(words)


def _growth_line(growth: GrowthLimit) -> str:
    """Return `"largest batch in 24 GiB: 96 (23.8 GiB; 97 needs 24.1 GiB), now 8"`."""
    parts = [format_bytes(growth.peak_bytes)] if growth.peak_bytes is not None else []
    if growth.next_bytes is not None:
        needs = format_bytes(growth.next_bytes)
        close = needs == format_bytes(growth.budget_bytes)
        over = f"{format_bytes(growth.next_bytes - growth.budget_bytes)} more"
        parts.append(f"{growth.largest + 1} needs {over if close else needs}")
    elif growth.limited_by:
        parts.append(f"{growth.largest + 1} does not run: {growth.limited_by}")
    largest = f"{'none fits' if growth.peak_bytes is None else growth.largest} ({'; '.join(parts)})"
    line = (
        f"largest {growth.what} in {format_bytes(growth.budget_bytes)}: {largest}, now {growth.now}"
    )
    if growth.falls:
        line += f"; memory falls somewhere up to {growth.tried}, so a larger one may fit too"
    return line


def tuned_lines(report: Report) -> list[str]:
    """Return the line to change, the measured settings, fastest first, and the skipped ones."""
    tuned = report.tuned
    if tuned is None:
        return []
    tuning = tuned.tuning
    lines = [f"change {tuned.change}" if tuning.chosen != tuning.before else "nothing to change"]
    if tuning.path:
        lines[0] += f", at {tuning.path}:{tuning.line}"
    if tuning.source == "modelled":
        lines.append(
            f"modelled for {tuning.cores} cores from measurements on this machine; measure it there"
        )
    lines += [
        f"{format_seconds(one.seconds)} a batch: {settings_words(one.settings)} ({one.batches} batches)"
        for one in sorted(tuning.tried, key=lambda one: one.seconds)
    ]
    return [*lines, *(f"not tried: {one}" for one in tuning.skipped)]


def tuned_sentence(report: Report) -> str:
    """Return the headline of a report on a loader."""
    assert report.tuned is not None
    tuning = report.tuned.tuning
    if tuning.chosen == tuning.before:
        return f"No faster loader settings found: {format_seconds(tuning.before_seconds)} a batch"
    before, after = tuning.before_seconds, tuning.after_seconds
    predicted = " modelled" if tuning.source == "modelled" else ""
    return (
        f"Loader: {format_seconds(before)} -> {format_seconds(after)}{predicted} a batch, step included, "
        f"{before / max(after, 1e-9):.1f} times as fast"
    )


def settings_words(settings: LoaderSettings) -> str:
    """Describe loader settings in words."""
    whole = ", each batch fetched as a whole" if settings.whole else ""
    if not settings.workers:
        return f"no workers{whole}"
    workers = counted(settings.workers, "worker")
    return f"{workers}, prefetch_factor {settings.prefetch}{whole}"


@dataclass(frozen=True, kw_only=True)
class FigureRow:
    """A row with a cell for each head. `kind`: its kind of memory, if any; `bar`: bytes before and after."""

    name: str
    cells: tuple[str, ...]
    kind: str = ""
    bar: tuple[int, int] = (0, 0)


def figure_rows(report: Report) -> tuple[tuple[str, ...], tuple[FigureRow, ...]]:
    """Return the heads of the known columns, and the rows: peak, step, and the kinds at the peak."""
    known = {
        "original": report.original is not None,
        "predicted": report.plan is not None and not facts.is_idle(report),
        "planned": report.planned is not None,
    }
    heads = tuple(head for head, has in known.items() if has)
    return heads, (*_peak_rows(report, heads), *_kind_rows(report, heads))


def _peak_rows(report: Report, heads: tuple[str, ...]) -> list[FigureRow]:
    predicted = report.plan.predicted if report.plan else None
    figures = {
        "original": (peak_before(report), report.original and report.original.step_seconds),
        "predicted": (predicted and predicted.peak_bytes, predicted and predicted.step_seconds),
        "planned": (peak_after(report), report.planned and report.planned.step_seconds),
    }
    peaks, steps = zip(*(figures[head] for head in heads), strict=True) if heads else ((), ())
    cells = tuple(known(peak, format_bytes) for peak in peaks)
    rows = [FigureRow(name=PEAKS[report.memory_kind], cells=cells)]
    if any(steps):
        cells = tuple(known(step, format_seconds) for step in steps)
        rows.append(FigureRow(name=step_name(report), cells=cells))
    return rows


def _kind_rows(report: Report, heads: tuple[str, ...]) -> list[FigureRow]:
    before = report.original.by_kind if report.original else {}
    after = report.planned.by_kind if report.planned else {}
    rows = []
    for kind in sorted({*before, *after}, key=lambda k: (-before.get(k, after.get(k, 0)), k)):
        bar = before.get(kind, 0), after.get(kind, 0)
        shown = {"original": before.get(kind), "planned": after.get(kind)}
        cells = tuple(known(shown.get(head), format_bytes) for head in heads)
        if any(bar):
            lone = bar if report.planned else (bar[0], bar[0])
            rows.append(FigureRow(name=kind.replace("_", " "), cells=cells, kind=kind, bar=lone))
    return rows
