"""What an estimate says, in lines that every form of a report has."""

from __future__ import annotations

from torchtrim.core.units import format_bytes
from torchtrim.records.estimate import Growth
from torchtrim.records.report import Report
from torchtrim.records.sharding import Sharded
from torchtrim.report.facts import runs


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
        places = ", ".join(runs(found.recomputed))
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
    some = ", ".join(runs(blocks))
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
