"""Keeps what a plan may put into memory of the host within a budget of its own."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torchtrim.executor.registry import Option, edit_of, in_files_of
from torchtrim.memory.curve import bytes_over_time
from torchtrim.step.edits import Block, Edit
from torchtrim.step.host import host_blocks, host_peak
from torchtrim.step.step import Step

Pair = tuple[Option, Edit]


def within_host(step: Step, pairs: Sequence[Pair], host_bytes: int | None) -> list[Pair]:
    """The options of which all together take no more of the host's memory than there is.

    Those come first that free the most bytes for the longest; what takes none of it stays. None: no limit.
    """
    if host_bytes is None:
        return list(pairs)
    taken: list[Block] = []
    admitted: set[int] = set()
    order = sorted(range(len(pairs)), key=lambda number: -_area(pairs[number][1]))
    for number in order:
        blocks = host_blocks(pairs[number][1])
        if _highest(step, [*taken, *blocks]) <= host_bytes:
            taken += blocks
            admitted.add(number)
    while host_peak(pairs[number][1] for number in admitted) > host_bytes:
        admitted.remove(min(admitted, key=lambda number: _area(pairs[number][1])))
    return [pair for number, pair in enumerate(pairs) if number in admitted or not _area(pair[1])]


def in_files(
    step: Step, pairs: Sequence[Pair], admitted: Sequence[Pair], names: Iterable[str]
) -> list[Pair]:
    """What techniques can keep in files: of that which is on the host, the options that were not admitted."""
    kept = {option.where for option, _ in admitted}
    on_host = {option.where for option, edit in pairs if host_blocks(edit)}
    found = []
    for name in names:
        for option in in_files_of(name, step):
            if option.where.removesuffix(" in file") in kept & on_host:
                continue
            if (edit := edit_of(step, option)) is not None:
                found.append((option, edit))
    return found


def _area(edit: Edit) -> int:
    return sum(block.bytes * (block.last - block.first) for block in host_blocks(edit))


def _highest(step: Step, blocks: Sequence[Block]) -> int:
    lives = ((block.bytes, block.first, block.last) for block in blocks)
    return max(bytes_over_time(len(step.tasks), lives), default=0)
