"""Eviction policies: they order the entries for eviction. Any object with `Policy`'s methods works."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import Protocol

from torchtrim.stream.tombstones import Key


class Policy(Protocol):
    """Gets notified of writes, reads and evictions, and decides the order of eviction."""

    def on_put(self, key: Key, nbytes: int) -> None:
        """An entry of `nbytes` bytes was written."""

    def on_read(self, key: Key) -> None:
        """An entry was read."""

    def on_evict(self, key: Key) -> None:
        """An entry was removed, for any reason."""

    def order(self, candidates: Iterable[Key]) -> Iterable[Key]:
        """Return the candidates in order of eviction. Candidates that are left out stay."""


class Oldest:
    """First written, first out."""

    def __init__(self) -> None:
        self._keys: OrderedDict[Key, int] = OrderedDict()

    def on_put(self, key: Key, nbytes: int) -> None:
        """Move the key to the end of the queue."""
        self._keys.pop(key, None)
        self._keys[key] = nbytes

    def on_read(self, key: Key) -> None:
        """Ignored: reads do not change the order."""

    def on_evict(self, key: Key) -> None:
        """Remove the key from the queue."""
        self._keys.pop(key, None)

    def order(self, candidates: Iterable[Key]) -> Iterable[Key]:
        """Return the candidates in the order of the queue."""
        wanted = set(candidates)
        return [key for key in self._keys if key in wanted]


class LeastRecent(Oldest):
    """Least recently used first (LRU), counting reads and writes."""

    def on_read(self, key: Key) -> None:
        """Move the key to the end of the queue."""
        if key in self._keys:
            self._keys.move_to_end(key)


class LeastRead(Oldest):
    """Least frequently read first (LFU), ties by age."""

    def __init__(self) -> None:
        super().__init__()
        self._reads: dict[Key, int] = {}

    def on_read(self, key: Key) -> None:
        """Count the read."""
        self._reads[key] = self._reads.get(key, 0) + 1

    def on_evict(self, key: Key) -> None:
        """Remove the key and its count."""
        super().on_evict(key)
        self._reads.pop(key, None)

    def order(self, candidates: Iterable[Key]) -> Iterable[Key]:
        """Return the candidates by number of reads."""
        return sorted(super().order(candidates), key=lambda key: self._reads.get(key, 0))


class Largest(Oldest):
    """Largest first, ties by age."""

    def order(self, candidates: Iterable[Key]) -> Iterable[Key]:
        """Return the candidates by size, largest first."""
        return sorted(super().order(candidates), key=lambda key: -self._keys[key])


class Cheapest(Oldest):
    """Lowest recomputation cost per byte first. `cost(key)` may have any unit, such as seconds."""

    def __init__(self, cost: Callable[[Key], float]) -> None:
        super().__init__()
        self._cost = cost

    def order(self, candidates: Iterable[Key]) -> Iterable[Key]:
        """Return the candidates by cost per byte."""
        queued = super().order(candidates)
        return sorted(queued, key=lambda key: self._cost(key) / max(self._keys[key], 1))
