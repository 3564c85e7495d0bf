"""Sets of frame numbers and the heads of a stream, in constant memory."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any


class Routed(dict[Any, Any]):
    """A dict that routes all writes through `__setitem__` and all removals through `pop`.

    A plain dict's `update`, `|=`, `setdefault`, `popitem`, `del` and `clear` bypass both.
    """

    __slots__ = ()

    def update(self, *others: Any, **more: Any) -> None:
        """See `dict`."""
        for key, value in dict(*others, **more).items():
            self[key] = value

    def __ior__(self, other: Any) -> Any:  # type: ignore[misc]
        self.update(other)
        return self

    def setdefault(self, key: Any, default: Any = None) -> Any:
        """See `dict`."""
        if key not in self:
            self[key] = default
        return self[key]

    def popitem(self) -> tuple[Any, Any]:
        """See `dict`."""
        key = next(reversed(self))
        return key, self.pop(key)

    def __delitem__(self, key: Any) -> None:
        self.pop(key)

    def clear(self) -> None:
        """See `dict`."""
        for key in list(self):
            del self[key]


_MOST_RANGES = 64  # Arbitrary: a steady stream with some gaps has a few.


@dataclass(slots=True)
class _FrameRange:
    first: int
    last: int
    step: int = 0
    blurred: bool = False

    def takes(self, frame: int) -> bool:
        if self.blurred:
            return False
        if self.step == 0:
            self.step = frame - self.first
        elif frame != self.last + self.step:
            return False
        self.last = frame
        return True

    def is_sound(self, whole: _FrameRange) -> bool:
        """True if the range is not empty after being cut from `whole`. A single frame loses its step."""
        if whole.step == 0 or (self.last - self.first) * whole.step < 0:
            return False
        if self.first == self.last:
            self.step = 0
        return True

    def has(self, frame: int) -> bool:
        low, high = sorted((self.first, self.last))
        return low <= frame <= high and (
            self.blurred or self.step == 0 or (frame - self.first) % self.step == 0
        )


class FrameSet:
    """Frame numbers as ranges with a step, so a steady stream of any length is one range.

    Above `most` ranges, the two oldest merge into a blurred one, whose numbers may or may not be in the set.
    """

    __slots__ = ("_count", "_most", "_ranges")

    def __init__(self, most: int = _MOST_RANGES) -> None:
        self._ranges: list[_FrameRange] = []
        self._most = most
        self._count = 0

    def add(self, frame: int) -> None:
        """Add a frame, unless it is known to be in the set."""
        ranges = self._ranges
        if len(ranges) == 1:
            one = ranges[0]
            if one.step and not one.blurred and frame == one.last + one.step:
                one.last = frame
                self._count += 1
                return
        if self.knows(frame) is True:
            return
        self._count += 1
        if not (self._ranges and self._ranges[-1].takes(frame)):
            self._ranges.append(_FrameRange(frame, frame))
        if len(self._ranges) > self._most:
            self._blur()

    def knows(self, frame: int) -> bool | None:
        """Return whether the frame is in the set, or `None` where the set is blurred."""
        blurred = {one.blurred for one in self._ranges if one.has(frame)}
        if False in blurred:
            return True
        return None if blurred else False

    def discard(self, frame: int) -> None:
        """Remove a frame if it is known to be in the set."""
        for place, one in enumerate(self._ranges):
            if not one.blurred and one.has(frame):
                before = _FrameRange(one.first, frame - one.step, one.step)
                after = _FrameRange(frame + one.step, one.last, one.step)
                parts = [part for part in (before, after) if part.is_sound(one)]
                self._ranges[place : place + 1] = parts
                self._count -= 1
                break
        if len(self._ranges) > self._most:
            self._blur()

    def frames(self) -> Iterator[int]:
        """Iterate over the frames known to be in the set, range by range."""
        for one in self._ranges:
            if not one.blurred:
                toward = 1 if one.step >= 0 else -1
                yield from range(one.first, one.last + toward, one.step or 1)

    def clear(self) -> None:
        """Remove all frames."""
        self._ranges.clear()
        self._count = 0

    def __len__(self) -> int:
        return self._count

    @property
    def ranges(self) -> int:
        """The number of ranges: the memory of the set."""
        return len(self._ranges)

    def _blur(self) -> None:
        one, other = self._ranges[:2]
        ends = (one.first, one.last, other.first, other.last)
        self._ranges[:2] = [_FrameRange(min(ends), max(ends), 1, blurred=True)]


class Heads:
    """The position of a stream: one frame, or two after a jump, since the stream may return.

    A move of at most `reach` frames moves the nearest head. A longer one opens a second head, and a third
    closes the least recent one. So the state that an interrupted stream needs survives one jump, and the
    state stays within twice the windows. `anchors` are frames that the stream may return to at any time;
    entries near them are kept.
    """

    __slots__ = ("_heads", "_reach", "anchors")

    def __init__(self, reach: int) -> None:
        self._reach = max(reach, 1)
        self._heads: list[int] = []
        self.anchors: set[int] = set()

    @property
    def now(self) -> int | None:
        """The current frame, or `None` before the first."""
        return self._heads[-1] if self._heads else None

    def move(self, frame: int) -> None:
        """Move the stream to `frame`."""
        heads = self._heads
        if heads and abs(heads[-1] - frame) <= self._reach:
            heads[-1] = frame
            return
        if len(heads) == 2:
            if abs(heads[0] - frame) <= self._reach:
                heads.reverse()
                heads[-1] = frame
                return
            del heads[0]
        heads.append(frame)

    def distance(self, frame: int) -> int:
        """Return the distance in frames to the nearest head or anchor, or 0 before the first move."""
        heads = self._heads
        return min((abs(head - frame) for head in (*heads, *self.anchors)), default=0)

    @property
    def only(self) -> int | None:
        """The only frame that distances count from, or `None` if there are several or no such frames."""
        return self._heads[0] if len(self._heads) == 1 and not self.anchors else None

    def clear(self) -> None:
        """Return to the state before the first move."""
        self._heads.clear()
        self.anchors.clear()
