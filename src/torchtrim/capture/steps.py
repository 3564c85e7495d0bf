"""Finds the boundaries of training steps: the shortest repeating cycle of optimizer steps."""

from __future__ import annotations

from collections.abc import Iterable

_PATIENCE = 16
"""Segments. Arbitrary: longer than the cycles of real programs, such as five critic steps of a GAN."""
_LONG = 64
"""Segments. Arbitrary: bounds the recording while no cycle is known."""
_KEPT = 512
"""Segments. Arbitrary: several times the longest cycle that is recognized."""


class Steps:
    """A detector of the top-level forwards that begin a new step.

    The optimizer steps between two forwards are a segment; a step is the shortest cycle of segments that
    has steps of all optimizers. With one optimizer that is one segment, micro-batches included. A GAN
    that alternates two optimizers is recognized after three segments, so its first step spans two cycles.
    Optimizers that have not stepped in 16 segments do not count. A segment that contradicts the cycle makes
    the detector learn it again, each time from twice as many segments; until then a step is 64 segments.
    Optimizers that step in the same backward, each with parameters of its own, count as one, since a step
    may leave modules out.
    """

    def __init__(self, optimizers: int = 1) -> None:
        self.expected = optimizers
        self._segment: list[int] = []
        self._history: list[tuple[int, ...]] = []
        self.seen: set[int] = set()
        self._period = 0
        self._since = 0
        self._evidence = 0
        self._joined: dict[int, int] = {}

    @property
    def dirty(self) -> bool:
        """True if an optimizer stepped since the last forward."""
        return bool(self._segment)

    def stepped(self, optimizer: int, *, in_backward: bool = False) -> None:
        """Record a step of an optimizer, given by number."""
        self._segment.append(optimizer)
        if in_backward:
            self._joined.setdefault(optimizer, optimizer)
        self.seen.add(self._joined.get(optimizer, optimizer))

    def forward(self) -> bool:
        """Record a top-level forward; return True if it begins a new step."""
        if not self._segment:
            return False
        self._join()
        self._history.append(self._as_joined(self._segment))
        self._segment.clear()
        self._since += 1
        if len(self._history) > 2 * _KEPT:
            del self._history[:-_KEPT]
        if self._period and not self._repeats(self._period, self._period + 1):
            self._period = 0
            self._evidence = 2 * self._evidence or 2
        if not self._period:
            self._period = self._relearned() if self._evidence else self._learned()
        if self._period:
            over = self._since % self._period == 0
        else:
            over = bool(self._evidence) and self._since >= _LONG
        if over:
            self._since = 0
        return over

    def _join(self) -> None:
        """Merge the optimizers that stepped in this segment's backward into one, in the history too."""
        ones = {self._joined[one] for one in self._segment if one in self._joined}
        if len(ones) < 2:
            return
        first = min(ones)
        self._joined = {one: first if into in ones else into for one, into in self._joined.items()}
        self.expected -= len(ones) - 1
        self.seen = {*self._as_joined(self.seen)}
        self._history = [self._as_joined(segment) for segment in self._history]

    def _as_joined(self, segment: Iterable[int]) -> tuple[int, ...]:
        """Return a segment with each group of merged optimizers once, in the place of its first."""
        left: list[int] = []
        for one in segment:
            into = self._joined.get(one)
            if into is None or into not in left:
                left.append(one if into is None else into)
        return tuple(left)

    def _learned(self) -> int:
        """Return the shortest period of all segments, or of the last 16, once it repeats, or 0."""
        count = len(self._history)
        expected = max(self.expected, len(self.seen))
        if count >= _PATIENCE:
            count = _PATIENCE
            expected = len({one for segment in self._history[-count:] for one in segment})
        for period in range(1, count + 1):
            begun = period < count or period == 1
            if begun and self._covers(period, expected) and self._repeats(period, count):
                return period
        return 0

    def _relearned(self) -> int:
        """Return the shortest period of enough recent segments to be sure, or 0."""
        for period in range(1, len(self._history) // 2 + 1):
            length = period * max(2, -(-self._evidence // period))
            is_long = length <= len(self._history) and self._repeats(period, length)
            if is_long and self._covers(period, len(self.seen)):
                self._since = 0
                return period
        return 0

    def _covers(self, period: int, expected: int) -> bool:
        """Return True if `expected` optimizers step within the last `period` segments."""
        return len({one for segment in self._history[-period:] for one in segment}) >= expected

    def _repeats(self, period: int, length: int) -> bool:
        history, end = self._history, len(self._history)
        first = max(end - length, 0) + period
        return all(history[i] == history[i - period] for i in range(end - 1, first - 1, -1))
