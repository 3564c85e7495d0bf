"""The input and the output of packing: buffers with lifetimes, offsets with their height."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import lcm

from torchtrim.errors import UsageError

_MOST = 1 << 58


@dataclass(frozen=True, slots=True)
class Buffer:
    """Bytes that are alive from `lower` until just before `upper`, in any unit of time.

    `id` names it among its kind. With a size of 0 or `lower == upper` it needs no room. Its offset is a
    multiple of `alignment`, in bytes.
    """

    id: str | int
    lower: int
    upper: int
    size: int
    alignment: int = 1

    @property
    def takes_room(self) -> bool:
        """Whether it has bytes at some moment."""
        return self.size > 0 and self.lower < self.upper


@dataclass(frozen=True, slots=True, kw_only=True)
class Packing:
    """Where each buffer is: buffers that are alive together do not overlap.

    `offsets` is in bytes, by id, in the order given. `height` is where the highest buffer ends, and
    `lower_bound` the most bytes alive at one moment. `optimal` says that no packing is lower: the bound is
    met, or a search saw that there is none.
    """

    offsets: Mapping[str | int, int]
    height: int
    lower_bound: int
    optimal: bool


def check(
    buffers: Sequence[Buffer], capacity: int | None, alignment: int, seconds: float | None
) -> None:
    """Refuse what cannot be packed. Raises `UsageError`, which names the buffer and the field."""
    if type(alignment) is not int or alignment < 1:
        raise UsageError(
            f"alignment={alignment!r} is no number of bytes that offsets could be multiples of; "
            "give 1 or more, such as 64."
        )
    if capacity is not None and (type(capacity) is not int or capacity < 0):
        raise UsageError(f"capacity={capacity!r} is no number of bytes; give 0 or more, or None.")
    if seconds is not None and not seconds >= 0:
        raise UsageError(f"seconds={seconds!r} is no time to search; give 0 or more, or None.")
    seen: set[str | int] = set()
    for place, buffer in enumerate(buffers):
        _check_one(buffer, place)
        if buffer.id in seen:
            raise UsageError(
                f"buffers[{place}] has the id {buffer.id!r} of an earlier one; offsets are given by id, "
                "so each buffer needs its own."
            )
        seen.add(buffer.id)
    _check_sum(sum(b.size + lcm(b.alignment, alignment) for b in buffers))


def _check_one(buffer: Buffer, place: int) -> None:
    for field in ("lower", "upper", "size", "alignment"):
        value = getattr(buffer, field)
        if type(value) is not int:
            raise UsageError(
                f"buffers[{place}] ({buffer.id!r}): {field} is {value!r}; an integer is needed."
            )
    if buffer.size < 0:
        raise UsageError(
            f"buffers[{place}] ({buffer.id!r}): size is {buffer.size}; a buffer has 0 bytes or more."
        )
    if buffer.alignment < 1:
        raise UsageError(
            f"buffers[{place}] ({buffer.id!r}): alignment is {buffer.alignment}; its offset is a multiple "
            "of it, so give 1 or more, such as 64."
        )
    if buffer.upper < buffer.lower:
        raise UsageError(
            f"buffers[{place}] ({buffer.id!r}) ends at {buffer.upper}, before it begins at {buffer.lower}; "
            "it is alive from lower until just before upper."
        )


def _check_sum(total: int) -> None:
    if total > _MOST:
        raise UsageError(
            f"the buffers have {total} bytes in all; up to 2**58 can be packed. Give the sizes in a "
            "larger unit, such as the alignment."
        )
