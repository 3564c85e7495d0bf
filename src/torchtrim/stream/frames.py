"""Sets of frame numbers and the heads of a stream, in memory that does not grow with the stream."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

_MOST_RANGES = 64  # Arbitrary; a stream that is steady but for some gaps has a few.


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
        """Whether it is a part of a range that it was cut from, and not empty."""
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
    """Frame numbers as ranges with a step: a steady stream is one range, however long it is.

    Above `most` ranges the two oldest become one that is blurred: numbers in it are then neither
    surely in the set nor surely out of it.
    """

    __slots__ = ("_count", "_most", "_ranges")

    def __init__(self, most: int = _MOST_RANGES) -> None:
        self._ranges: list[_FrameRange] = []
        self._most = most
        self._count = 0

    def add(self, frame: int) -> None:
        """Put a frame in; one that is surely in stays once."""
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
        """True, False, or `None` where the set is blurred."""
        blurred = False
        for one in reversed(self._ranges):
            if one.has(frame):
                if not one.blurred:
                    return True
                blurred = True
        return None if blurred else False

    def discard(self, frame: int) -> None:
        """Take a frame out, if it is surely in."""
        for place, one in enumerate(self._ranges):
            if not one.blurred and one.has(frame):
                before = _FrameRange(one.first, frame - one.step, one.step)
                after = _FrameRange(frame + one.step, one.last, one.step)
                kept = [part for part in (before, after) if part.is_sound(one)]
                self._ranges[place : place + 1] = kept
                self._count -= 1
                break
        if len(self._ranges) > self._most:
            self._blur()

    def frames(self) -> Iterator[int]:
        """The frames that are surely in it, range by range."""
        for one in self._ranges:
            if not one.blurred:
                toward = 1 if one.step >= 0 else -1
                yield from range(one.first, one.last + toward, one.step or 1)

    def clear(self) -> None:
        """Make it empty."""
        self._ranges.clear()
        self._count = 0

    def __len__(self) -> int:
        return self._count

    @property
    def ranges(self) -> int:
        """Of how many ranges it is made: what it costs."""
        return len(self._ranges)

    def _blur(self) -> None:
        one, other = self._ranges[:2]
        ends = (one.first, one.last, other.first, other.last)
        self._ranges[:2] = [_FrameRange(min(ends), max(ends), 1, blurred=True)]


class Heads:
    """Where a stream is: at one frame, or at two when it looked elsewhere and may come back.

    A move of at most `reach` frames carries the nearest head along. A longer one opens a second head,
    and a third closes the one that was left longest ago; so what an interrupted stream needs survives
    one excursion, and state stays within twice the windows. `anchors` are frames that the stream may
    return to at any time, and near which nothing is far.
    """

    __slots__ = ("_heads", "_reach", "anchors")

    def __init__(self, reach: int) -> None:
        self._reach = max(reach, 1)
        self._heads: list[int] = []
        self.anchors: set[int] = set()

    @property
    def now(self) -> int | None:
        """The frame that the stream is at, `None` before its first."""
        return self._heads[-1] if self._heads else None

    def move(self, frame: int) -> None:
        """The stream is at `frame`."""
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
        """Frames from the nearest head or anchor; 0 before the first move."""
        heads = self._heads
        return min((abs(head - frame) for head in (*heads, *self.anchors)), default=0)

    @property
    def only(self) -> int | None:
        """The one frame that distances count from, `None` where there are several or none."""
        return self._heads[0] if len(self._heads) == 1 and not self.anchors else None

    def clear(self) -> None:
        """As before the first move."""
        self._heads.clear()
        self.anchors.clear()
