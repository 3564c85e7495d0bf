"""Which entries a budget takes first. An order is an object; any with these four methods will do."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import Protocol

from torchtrim.stream.tombstones import Key


class Policy(Protocol):
    """Told of each entry that is written, read and gone; asked in which order to evict."""

    def on_put(self, key: Key, nbytes: int) -> None:
        """An entry of `nbytes` bytes was written."""

    def on_read(self, key: Key) -> None:
        """An entry was read."""

    def on_evict(self, key: Key) -> None:
        """An entry is gone, for whatever reason."""

    def order(self, candidates: Iterable[Key]) -> Iterable[Key]:
        """The candidates, the first to go first. Entries it does not return stay."""


class Oldest:
    """First written, first out."""

    def __init__(self) -> None:
        self._keys: OrderedDict[Key, int] = OrderedDict()

    def on_put(self, key: Key, nbytes: int) -> None:
        """To the end of the queue."""
        self._keys.pop(key, None)
        self._keys[key] = nbytes

    def on_read(self, key: Key) -> None:
        """Reading changes nothing here."""

    def on_evict(self, key: Key) -> None:
        """Out of the queue."""
        self._keys.pop(key, None)

    def order(self, candidates: Iterable[Key]) -> Iterable[Key]:
        """As they stand in the queue."""
        wanted = set(candidates)
        return [key for key in self._keys if key in wanted]


class LeastRecent(Oldest):
    """Read or written longest ago, first out (LRU)."""

    def on_read(self, key: Key) -> None:
        """To the end of the queue."""
        if key in self._keys:
            self._keys.move_to_end(key)


class LeastRead(Oldest):
    """Read least often, first out (LFU); of equals the oldest."""

    def __init__(self) -> None:
        super().__init__()
        self._reads: dict[Key, int] = {}

    def on_read(self, key: Key) -> None:
        """Counted."""
        self._reads[key] = self._reads.get(key, 0) + 1

    def on_evict(self, key: Key) -> None:
        """Its count goes too."""
        super().on_evict(key)
        self._reads.pop(key, None)

    def order(self, candidates: Iterable[Key]) -> Iterable[Key]:
        """By their counts."""
        return sorted(super().order(candidates), key=lambda key: self._reads.get(key, 0))


class Largest(Oldest):
    """Most bytes, first out; of equals the oldest."""

    def order(self, candidates: Iterable[Key]) -> Iterable[Key]:
        """By their bytes."""
        return sorted(super().order(candidates), key=lambda key: -self._keys[key])


class Cheapest(Oldest):
    """Least cost to make again for each byte, first out. `cost(key)` is in any unit, such as seconds."""

    def __init__(self, cost: Callable[[Key], float]) -> None:
        super().__init__()
        self._cost = cost

    def order(self, candidates: Iterable[Key]) -> Iterable[Key]:
        """By cost per byte."""
        queued = super().order(candidates)
        return sorted(queued, key=lambda key: self._cost(key) / max(self._keys[key], 1))
