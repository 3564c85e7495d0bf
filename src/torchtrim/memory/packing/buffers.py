"""Input and output of the packer: buffers with lifetimes, and offsets with their height."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import accumulate
from math import gcd, lcm

from torchtrim.errors import UsageError

# Bytes, the first moment they are live, and the first moment they no longer are.
Life = tuple[int, int, int]


def bytes_over_time(moments: int, lives: Iterable[Life]) -> list[int]:
    """Return the live bytes at each moment `0 <= i < moments`. Lifetimes may extend beyond both ends."""
    change = [0] * (moments + 1)
    for size, first, last in lives:
        first, last = max(first, 0), min(last, moments)
        if first < last:
            change[first] += size
            change[last] -= size
    return list(accumulate(change))[:moments]


_MOST = 1 << 58  # Bytes; sums of offsets and sizes stay below `search.MANY`.


@dataclass(frozen=True, slots=True)
class Buffer:
    """Bytes that are live from `lower` until just before `upper`, in any unit of time.

    Ids are unique. A buffer with size 0 or `lower == upper` takes no room. `alignment`: of its offset.
    """

    id: str | int
    lower: int
    upper: int
    size: int
    alignment: int = 1

    @property
    def takes_room(self) -> bool:
        """True if the buffer has bytes at some moment."""
        return self.size > 0 and self.lower < self.upper


@dataclass(frozen=True, slots=True, kw_only=True)
class Packing:
    """Offsets such that buffers live at the same time do not overlap.

    `offsets`: bytes by id, in input order. `height`: the end of the highest buffer. `lower_bound`: the most
    bytes live at one moment. `optimal`: the height meets the bound, or the search was exhaustive.
    """

    offsets: Mapping[str | int, int]
    height: int
    lower_bound: int
    optimal: bool


def check(
    buffers: Sequence[Buffer], capacity: int | None, alignment: int, seconds: float | None
) -> None:
    """Check the arguments of `pack`. Raises `UsageError` with the buffer and the field."""
    if type(alignment) is not int or alignment < 1:
        raise UsageError(
            f"alignment={alignment!r} is not a valid alignment. Give 1 byte or more, such as 64."
        )
    if capacity is not None and (type(capacity) is not int or capacity < 0):
        raise UsageError(
            f"capacity={capacity!r} is not a number of bytes. Give 0 or more, or None."
        )
    if seconds is not None and not seconds >= 0:
        raise UsageError(f"seconds={seconds!r} is not a search time. Give 0 or more, or None.")
    seen: set[str | int] = set()
    for place, buffer in enumerate(buffers):
        _check_one(buffer, place)
        if buffer.id in seen:
            raise UsageError(
                f"buffers[{place}] has the id {buffer.id!r} of an earlier buffer. Offsets are "
                "returned by id, so ids must be unique."
            )
        seen.add(buffer.id)
    total = sum(b.size + lcm(b.alignment, alignment) for b in buffers)
    if total > _MOST:
        raise UsageError(
            f"the buffers have {total} bytes in total, but at most 2**58 can be packed. Give "
            "the sizes in a larger unit, such as the alignment."
        )


def _check_one(buffer: Buffer, place: int) -> None:
    name = f"buffers[{place}] ({buffer.id!r})"
    for field in ("lower", "upper", "size", "alignment"):
        value = getattr(buffer, field)
        if type(value) is not int:
            raise UsageError(f"{name}: {field} is {value!r}; it must be an integer.")
    if buffer.size < 0:
        raise UsageError(f"{name}: size is {buffer.size}; it must be 0 or more.")
    if buffer.alignment < 1:
        raise UsageError(
            f"{name}: alignment is {buffer.alignment}; it must be 1 or more, such as 64."
        )
    if buffer.upper < buffer.lower:
        raise UsageError(
            f"{name} ends at {buffer.upper}, before it begins at {buffer.lower}. It is live from "
            "lower until just before upper."
        )


@dataclass(frozen=True, kw_only=True)
class PackingProblem:
    """Buffers to pack, one entry each: `lower` and `upper` are half-open ranges of sections.

    lifetime: time that the buffer is live, in the caller's unit.
    size: bytes, rounded up to the common alignment of all offsets.
    padding: bytes added by rounding.
    align: alignment of the offset if stricter than the common one, else 1.
    load: bytes live in each section.
    crowd: most bytes live at the same time as the buffer, itself included.
    """

    lower: list[int]
    upper: list[int]
    lifetime: list[int]
    size: list[int]
    padding: list[int]
    align: list[int]
    load: list[int]
    crowd: list[int]
    lower_bound: int

    @property
    def count(self) -> int:
        """Number of buffers."""
        return len(self.size)

    @property
    def rows(self) -> tuple[list[int], list[int], list[int], list[int]]:
        """Columns that the compiled loops read: lower, upper, size and align."""
        return self.lower, self.upper, self.size, self.align

    @property
    def floor(self) -> int:
        """Lower bound on the height of a packing of the rounded sizes."""
        return max(self.load, default=0)

    @property
    def step(self) -> int:
        """Greatest common divisor of all possible heights."""
        return gcd(*self.size, *(align for align in self.align if align > 1)) or 1

    @property
    def spans(self) -> int:
        """Total number of sections that the buffers span."""
        return sum(self.upper) - sum(self.lower)

    def height(self, offsets: Sequence[int]) -> int:
        """Return the end of the highest buffer, without its padding."""
        columns = zip(offsets, self.size, self.padding, strict=True)
        return max((offset + size - padding for offset, size, padding in columns), default=0)


def problem_of(buffers: Sequence[Buffer], alignment: int) -> PackingProblem:
    """Return the packing problem of these buffers. Each takes room; offsets respect both alignments."""
    lower, upper, sections = _sections(buffers)
    own = [lcm(b.alignment, alignment) for b in buffers]
    shared = gcd(*own)
    size = [-(-b.size // shared) * shared for b in buffers]
    padding = [s - b.size for s, b in zip(size, buffers, strict=True)]
    load = bytes_over_time(sections, zip(size, lower, upper, strict=True))
    return PackingProblem(
        lower=lower,
        upper=upper,
        lifetime=[b.upper - b.lower for b in buffers],
        size=size,
        padding=padding,
        align=[1 if align == shared else align for align in own],
        load=load,
        crowd=_most_within(load, lower, upper),
        lower_bound=_bound(lower, upper, load, padding),
    )


def _sections(buffers: Sequence[Buffer]) -> tuple[list[int], list[int], int]:
    events = [(b.lower, 1, i) for i, b in enumerate(buffers)]
    events += [(b.upper, 0, i) for i, b in enumerate(buffers)]
    lower, upper = [0] * len(buffers), [0] * len(buffers)
    section, grown = 0, False
    for _, begins, i in sorted(events):
        if begins:
            lower[i], grown = section, True
            continue
        section += grown
        upper[i], grown = section, False
    return lower, upper, section


def _bound(lower: list[int], upper: list[int], load: list[int], padding: list[int]) -> int:
    """Return the most bytes live at once. The highest buffer of a section needs no padding."""
    if not any(padding):
        return max(load, default=0)
    starting: list[list[int]] = [[] for _ in load]
    for i, low in enumerate(lower):
        starting[low].append(i)
    alive: list[tuple[int, int]] = []
    bound = 0
    for section, total in enumerate(load):
        for i in starting[section]:
            heappush(alive, (-padding[i], upper[i]))
        while alive[0][1] <= section:
            heappop(alive)
        bound = max(bound, total + alive[0][0])
    return bound


def _most_within(values: list[int], lower: list[int], upper: list[int]) -> list[int]:
    tables = [values]
    while 2 ** len(tables) <= len(values):
        last, half = tables[-1], 2 ** (len(tables) - 1)
        tables.append([max(a, b) for a, b in zip(last, last[half:], strict=False)])
    largest = []
    for low, high in zip(lower, upper, strict=True):
        level = (high - low).bit_length() - 1
        largest.append(max(tables[level][low], tables[level][high - 2**level]))
    return largest
