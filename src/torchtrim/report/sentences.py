"""What a report says in sentences, part by part: the same in every form of it."""

from __future__ import annotations

from torchtrim.core.units import format_bytes, format_seconds
from torchtrim.records.estimate import Growth
from torchtrim.records.job import RankFigures
from torchtrim.records.loader import LoaderSettings, Tried
from torchtrim.records.profile import is_emulated
from torchtrim.records.report import Report
from torchtrim.records.sharding import Sharded
from torchtrim.report import facts
from torchtrim.report.blocks import Items


def sentences(report: Report) -> dict[str, Items]:
    """The parts that are sentences alone, by their label."""
    proof = facts.certificate_lines(report.certificate) if report.certificate else ()
    parts = (
        Items("smallest is", "What the smallest peak is made of", facts.part_lines(report)),
        Items("levers", "What each lever would reach", facts.lever_lines(report)),
        Items("fixes", "Fixes", facts.fix_lines(report)),
        Items("ranks", "Ranks", rank_lines(report)),
        Items("plan", "Plan", facts.plan_lines(report)),
        Items("certificate", "Certificate", proof),
        Items("estimate", "Estimate", estimate_lines(report)),
        Items("loader", "Loader", tuned_lines(report)),
        Items("waits", "Waits", facts.waiting_lines(report)),
        Items("note", "Notes", report.notes),
    )
    return {part.label: part for part in parts}


def rank_lines(report: Report) -> list[str]:
    """A line for each rank: its peak, and what it exchanged; none where there was one process."""
    timed = not is_emulated(report.device)
    return [_rank_line(rank, timed) for rank in report.ranks]


def _rank_line(rank: RankFigures, timed: bool) -> str:
    said = [f"rank {rank.rank}: {_peak(rank)}"]
    if rank.collectives:
        several = "s" * (rank.collectives != 1)
        said.append(
            f"{rank.collectives} collective{several} of {format_bytes(rank.exchanged_bytes)}"
        )
    if rank.collectives and timed:
        said.append(f"blocked by them {format_seconds(rank.blocked_seconds)}")
        said.append(f"{format_seconds(rank.waited_seconds)} of it for a later rank")
    return ", ".join(said)


def _peak(rank: RankFigures) -> str:
    before = format_bytes(rank.original.peak_bytes) if rank.original else "no"
    after = f" -> {format_bytes(rank.planned.peak_bytes)}" if rank.planned else ""
    return f"peak {before}{after}"


def estimate_lines(report: Report) -> list[str]:
    """What an estimate knows to the byte, what would free memory, and how far the batch can grow."""
    found = report.estimated
    if found is None:
        return []
    exact = (
        ("parameters", found.parameter_bytes),
        ("gradients", found.gradient_bytes),
        ("optimizer state", found.optimizer_bytes),
    )
    lines = [", ".join(f"{name} {format_bytes(size)}" for name, size in exact if size)]
    if found.sharded is not None:
        lines.insert(0, _sharded_line(found.sharded))
    if found.recomputed_bytes is not None:
        places = ", ".join(facts.runs(found.recomputed))
        lines.append(
            f"recomputed, it is predicted to need {format_bytes(found.recomputed_bytes)}: {places}"
        )
    return [line for line in (*lines, *map(_growth_line, found.growth)) if line]


def _sharded_line(sharded: Sharded) -> str:
    """`"the first of 8 ranks, fully_shard on Net.layers.0 ... Net.layers.31 and on what is left"`."""
    first = f"the first of {sharded.ranks} rank{'' if sharded.ranks == 1 else 's'}"
    options = sharded.options
    if options is None:
        return first
    words = [f"{first}, fully_shard on {_blocks(sharded.blocks)}"]
    if not options.reshard:
        words.append("blocks stay gathered until backward")
    if options.compute:
        words.append(f"computed in {options.compute}, gradients reduced in float32")
    if options.offload:
        words.append("shards and optimizer state on the host")
    return "; ".join(words)


def _blocks(blocks: tuple[str, ...]) -> str:
    if not blocks:
        return "the whole: no block repeats (--fsdp-blocks PATTERN)"
    some = ", ".join(facts.runs(blocks))
    return f"{len(blocks)} block{'' if len(blocks) == 1 else 's'} ({some}) and on the rest"


def _growth_line(growth: Growth) -> str:
    """`"largest batch in 24 GiB: 96 (23.8 GiB; 97 needs 24.1 GiB), now 8"`."""
    known = growth.peak_bytes is not None
    parts = [format_bytes(growth.peak_bytes)] if growth.peak_bytes is not None else []
    if growth.next_bytes is not None:
        needs = format_bytes(growth.next_bytes)
        close = needs == format_bytes(growth.budget_bytes)
        over = f"{format_bytes(growth.next_bytes - growth.budget_bytes)} more"
        parts.append(f"{growth.largest + 1} needs {over if close else needs}")
    elif growth.limited_by:
        parts.append(f"{growth.largest + 1} does not run: {growth.limited_by}")
    told = f"{growth.largest if known else 'none fits'} ({'; '.join(parts)})"
    line = f"largest {growth.what} in {format_bytes(growth.budget_bytes)}: {told}, now {growth.now}"
    if growth.falls:
        line += f"; memory falls somewhere up to {growth.tried}, so a longer one may fit too"
    return line


def tuned_lines(report: Report) -> list[str]:
    """The settings that were tried, the quickest first, those that were not, and the line to change."""
    found = report.tuned
    if found is None:
        return []
    tuning = found.tuning
    lines = [f"change {found.change}" if tuning.chosen != tuning.before else "nothing to change"]
    if tuning.path:
        lines[0] += f", at {tuning.path}:{tuning.line}"
    if tuning.source == "modelled":
        lines.append(f"modelled for {tuning.cores} cores from measurements here; measure it there")
    lines += map(_tried, sorted(tuning.tried, key=lambda one: one.seconds))
    return [*lines, *(f"not tried: {one}" for one in tuning.skipped)]


def tuned_sentence(report: Report) -> str:
    """The sentence of a report on a loader."""
    assert report.tuned is not None
    tuning = report.tuned.tuning
    if tuning.chosen == tuning.before:
        return f"The loader stays: {format_seconds(tuning.before_seconds)} a batch, nothing quicker found"
    before, after = tuning.before_seconds, tuning.after_seconds
    predicted = " modelled" if tuning.source == "modelled" else ""
    return (
        f"Loader: {format_seconds(before)} -> {format_seconds(after)}{predicted} a batch with its step, "
        f"{before / max(after, 1e-9):.1f} times as fast"
    )


def _tried(one: Tried) -> str:
    return f"{format_seconds(one.seconds)} a batch: {said_of(one.settings)} ({one.batches} batches)"


def said_of(settings: LoaderSettings) -> str:
    """Settings in words."""
    whole = ", each batch fetched as a whole" if settings.whole else ""
    if not settings.workers:
        return f"no workers{whole}"
    plural = "s" * (settings.workers != 1)
    return f"{settings.workers} worker{plural}, {settings.prefetch} ahead of each{whole}"
