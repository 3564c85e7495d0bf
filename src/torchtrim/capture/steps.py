"""Where one step ends and the next begins: the shortest repeating cycle of optimizer steps."""

from __future__ import annotations

_PATIENCE = 16
_LONG = 64
_KEPT = 512


class Steps:
    """Told of optimizer steps and of top-level forwards, it says which forwards begin a new step.

    The optimizer steps between two forwards are a segment; a step is the shortest cycle of segments in
    which every optimizer steps. With one optimizer that is one segment, micro-batches included. A GAN
    that alternates two is known after three segments, so its first step spans two cycles. An optimizer
    that has not stepped in sixteen segments is not waited for. A segment that contradicts the cycle
    makes it be learnt anew, each time from twice as many segments; meanwhile a step is sixty-four.
    """

    def __init__(self, optimizers: int = 1) -> None:
        self.expected = optimizers
        self._segment: list[int] = []
        self._history: list[tuple[int, ...]] = []
        self._seen: set[int] = set()
        self._period = 0
        self._since = 0
        self._evidence = 0

    @property
    def dirty(self) -> bool:
        """Whether an optimizer stepped since the last forward."""
        return bool(self._segment)

    def stepped(self, optimizer: int) -> None:
        """An optimizer, known by its number, has stepped."""
        self._segment.append(optimizer)
        self._seen.add(optimizer)

    def forward(self) -> bool:
        """A top-level forward begins; True if it is the first of a new step."""
        if not self._segment:
            return False
        self._remember()
        if self._period and not self._repeats(self._period, self._period + 1):
            self._period = 0
            self._evidence = 2 * self._evidence or 2
        if not self._period:
            self._period = self._relearnt() if self._evidence else self._learnt()
        over = self._since % self._period == 0 if self._period else self._is_long()
        if over:
            self._since = 0
        return over

    def _remember(self) -> None:
        self._history.append(tuple(self._segment))
        self._segment.clear()
        self._since += 1
        if len(self._history) > 2 * _KEPT:
            del self._history[:-_KEPT]

    def _learnt(self) -> int:
        """The shortest period of all segments, once it has begun to repeat; 0 for none."""
        count = len(self._history)
        waited = count >= _PATIENCE
        expected = len(self._seen) if waited else max(self.expected, len(self._seen))
        for period in range(1, count + 1):
            begun = period < count or period == 1
            if begun and self._covers(period, expected) and self._repeats(period, count):
                return period
        return 0

    def _relearnt(self) -> int:
        """The shortest period of the last segments, of as many as it takes to be sure; 0 for none."""
        for period in range(1, len(self._history) // 2 + 1):
            length = period * max(2, -(-self._evidence // period))
            if length > len(self._history):
                continue
            if self._repeats(period, length) and self._covers(period, len(self._seen)):
                self._since = 0
                return period
        return 0

    def _covers(self, period: int, expected: int) -> bool:
        """Whether so many optimizers step within the last segments."""
        return len({one for segment in self._history[-period:] for one in segment}) >= expected

    def _repeats(self, period: int, length: int) -> bool:
        """Whether the last segments repeat with a period."""
        history, end = self._history, len(self._history)
        first = max(end - length, 0) + period
        return all(history[i] == history[i - period] for i in range(end - 1, first - 1, -1))

    def _is_long(self) -> bool:
        return bool(self._evidence) and self._since >= _LONG
