"""Where one step ends and the next begins: the shortest repeating cycle of optimizer steps."""

from __future__ import annotations

_PATIENCE = 16


class Steps:
    """Told of optimizer steps and of top-level forwards, it says which forwards begin a new step.

    The optimizer steps between two forwards are a segment; a step is the shortest cycle of segments in
    which every optimizer steps. With one optimizer that is one segment, micro-batches included. A GAN
    that alternates two is known after three segments, so its first step spans two cycles. An optimizer
    that has not stepped in sixteen segments is not waited for.
    """

    def __init__(self, optimizers: int = 1) -> None:
        self.expected = optimizers
        self._segment: list[int] = []
        self._history: list[tuple[int, ...]] = []
        self._period = 0

    @property
    def dirty(self) -> bool:
        """Whether an optimizer stepped since the last forward."""
        return bool(self._segment)

    def stepped(self, optimizer: int) -> None:
        """An optimizer, known by its number, has stepped."""
        self._segment.append(optimizer)

    def forward(self) -> bool:
        """A top-level forward begins; True if it is the first of a new step."""
        if not self._segment:
            return False
        self._history.append(tuple(self._segment))
        self._segment.clear()
        if not self._period:
            self._period = self._find_period()
        return bool(self._period) and len(self._history) % self._period == 0

    def _find_period(self) -> int:
        history = self._history
        seen = {optimizer for segment in history for optimizer in segment}
        expected = len(seen) if len(history) >= _PATIENCE else max(self.expected, len(seen))
        for period in range(1, len(history) + 1):
            cycle = {optimizer for segment in history[:period] for optimizer in segment}
            repeats = all(a == b for a, b in zip(history, history[period:], strict=False))
            sure = (
                period < len(history) or len(cycle) == 1 == expected or len(history[0]) == expected
            )
            if len(cycle) >= expected and repeats and sure:
                return period
        return 0
