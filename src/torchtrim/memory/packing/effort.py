"""How long a search goes on: for a fixed effort, or for a time."""

from __future__ import annotations

import time


class Effort:
    """Units of work that are left, each about as long as another; `pace` is how many fit a second."""

    def __init__(self, units: float, pace: float, deadline: float | None = None) -> None:
        self._units = units
        self._pace = pace
        self._deadline = deadline

    @property
    def left(self) -> float:
        """Units left."""
        if self._deadline is None:
            return self._units
        return min(self._units, (self._deadline - time.monotonic()) * self._pace)

    def spend(self, units: float) -> None:
        """Count work that was done."""
        self._units -= units
