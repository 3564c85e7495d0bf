"""Independent validator of packings: a walk through time that shares no code with the packer."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator, Mapping, Sequence

from torchtrim.memory.packing.buffers import Buffer


def why_invalid(
    buffers: Sequence[Buffer],
    offsets: Mapping[str | int, int],
    *,
    capacity: int | None = None,
    alignment: int = 1,
) -> str | None:
    """Return the first reason why the offsets do not pack the buffers, or None if they do.

    Only buffers have offsets: non-negative multiples of `alignment` and of their own alignment. No buffer may
    end above `capacity`, or overlap another that is live at the same time.
    """
    known = {buffer.id for buffer in buffers}
    for name in offsets:
        if name not in known:
            return f"there is an offset for {name!r}, but no such buffer"
    for buffer in buffers:
        if (reason := _misplaced(buffer, offsets, capacity, alignment)) is not None:
            return reason
    return next(_clashes(buffers, offsets), None)


def _misplaced(
    buffer: Buffer, offsets: Mapping[str | int, int], capacity: int | None, alignment: int
) -> str | None:
    if buffer.id not in offsets:
        return f"buffer {buffer.id!r} has no offset"
    offset = offsets[buffer.id]
    if type(offset) is not int or offset < 0:
        return f"buffer {buffer.id!r} has the offset {offset!r}, which is not a valid address"
    for step in (alignment, buffer.alignment):
        if offset % step:
            return f"buffer {buffer.id!r} is at {offset}, which is not a multiple of {step}"
    if capacity is not None and offset + buffer.size > capacity:
        return (
            f"buffer {buffer.id!r} ends at {offset + buffer.size}, above the capacity of {capacity}"
        )
    return None


def _clashes(buffers: Iterable[Buffer], offsets: Mapping[str | int, int]) -> Iterator[str]:
    """Walk through time with the live buffers sorted by offset: a new one can only clash with neighbours."""
    real = [b for b in buffers if b.size > 0 and b.upper > b.lower]
    moments = [(b.upper, 0, place) for place, b in enumerate(real)]
    moments += [(b.lower, 1, place) for place, b in enumerate(real)]
    alive: list[tuple[int, int]] = []
    for _, begins, place in sorted(moments):
        entry = (offsets[real[place].id], place)
        at = bisect_left(alive, entry)
        if not begins:
            del alive[at]
            continue
        for _, other in alive[max(at - 1, 0) : at + 1]:
            if (clash := _clash(real[other], real[place], offsets)) is not None:
                yield clash
        insort(alive, entry)


def _clash(a: Buffer, b: Buffer, offsets: Mapping[str | int, int]) -> str | None:
    low = max(offsets[a.id], offsets[b.id])
    high = min(offsets[a.id] + a.size, offsets[b.id] + b.size)
    if low >= high:
        return None
    return (
        f"buffers {a.id!r} and {b.id!r} are both live from {max(a.lower, b.lower)} to "
        f"{min(a.upper, b.upper)} and share bytes {low} to {high}"
    )
