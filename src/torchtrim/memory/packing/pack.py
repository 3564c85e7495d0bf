"""Offsets for buffers with lifetimes, as low as they can be found."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torchtrim.memory.packing.buffers import Buffer, Packing, check
from torchtrim.memory.packing.improve import Placement, improving
from torchtrim.memory.packing.problem import PackingProblem, problem_of


def pack(
    buffers: Sequence[Buffer],
    capacity: int | None = None,
    *,
    alignment: int = 1,
    seconds: float | None = None,
    better: Callable[[Packing], None] | None = None,
) -> Packing:
    """Give each buffer an offset so that those alive together do not overlap, and all end low.

    buffers: their ids differ; lifetimes are half-open. A buffer of no bytes or no lifetime gets 0.
    capacity: the bytes that there are. The search ends where it is met; whether it was is for the caller to
        see: `height <= capacity`.
    alignment: offsets are multiples of it, in bytes, and of the buffer's own.
    seconds: how long to search after several greedy orders; 0 for these alone. None searches for a fixed
        effort, seconds to a minute where the bound is not met, and gives the same result each time.
    better: called with each packing that is lower than all before it, so that whoever interrupts the search
        has the best so far.

    The result is never higher than that of placing the largest first. It is compiled where numba is
    installed. Memory grows with the number of buffers, not with the pairs that are alive together.
    Raises `UsageError` for sizes, lifetimes and ids that cannot be packed.
    """
    check(buffers, capacity, alignment, seconds)
    taking = [buffer for buffer in buffers if buffer.takes_room]
    problem = problem_of(taking, alignment)
    best = Placement(offsets=[], height=0, proven=True)
    for best in improving(problem, capacity, seconds) if taking else ():
        if better is not None:
            better(_packing(buffers, taking, problem, best))
    return _packing(buffers, taking, problem, best)


def _packing(
    buffers: Sequence[Buffer], taking: Sequence[Buffer], problem: PackingProblem, layout: Placement
) -> Packing:
    offsets: dict[str | int, int] = dict.fromkeys((buffer.id for buffer in buffers), 0)
    offsets.update(zip((buffer.id for buffer in taking), layout.offsets, strict=True))
    return Packing(
        offsets=offsets,
        height=layout.height,
        lower_bound=problem.lower_bound,
        optimal=layout.proven or layout.height <= problem.lower_bound,
    )
