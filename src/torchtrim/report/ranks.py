"""What a report says of the ranks of a job: a sentence each."""

from __future__ import annotations

from torchtrim.core.units import format_bytes, format_seconds
from torchtrim.records import Report
from torchtrim.records.job import RankFigures
from torchtrim.records.profile import is_emulated


def rank_lines(report: Report) -> list[str]:
    """A line for each rank: its peak, and what it exchanged; none where there was one process."""
    timed = not is_emulated(report.device)
    return [_line(rank, timed) for rank in report.ranks]


def _line(rank: RankFigures, timed: bool) -> str:
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
