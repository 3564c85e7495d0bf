"""Which work of one stream is known to be done before work of another: vector clocks, and what races.

The method is that of race detectors for threads, with streams in place of threads: an event carries what its
stream had seen, and who awaits it has seen that too. Lamport, Time, Clocks, and the Ordering of Events
(1978); Mattern, Virtual Time and Global States of Distributed Systems (1989).
"""

from __future__ import annotations

import math
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

READ = "stream-read"
WRITE = "stream-write"
FREE = "stream-free"
_HOST = -1


class Access:
    """One operator on a stream: its serial there, and its number in a recording, -1 outside of one."""

    __slots__ = ("operator", "serial", "stream")

    def __init__(self, stream: int, serial: int) -> None:
        self.stream = stream
        self.serial = serial
        self.operator = -1


class Race(NamedTuple):
    """What may go wrong, as a row of `syncs`, and the operator that is to be changed."""

    row: str
    access: Access


Span = tuple[int, float]
"""From which byte of a storage to before which."""
WHOLE: Span = (0, math.inf)


class Use(NamedTuple):
    """A part of a storage that an operator uses."""

    storage: Any
    span: Span = WHOLE


class _Part:
    """A part of a storage: by whom it was written last, by whom it was read since."""

    __slots__ = ("reads", "span", "write")

    def __init__(self, span: Span, write: Access | None) -> None:
        self.span = span
        self.write = write
        self.reads: dict[int, Access] = {}

    def meets(self, span: Span) -> bool:
        """Whether a byte is in both."""
        return self.span[0] < span[1] and span[0] < self.span[1]

    def is_within(self, span: Span) -> bool:
        """Whether all of it is in a span."""
        return span[0] <= self.span[0] and self.span[1] <= span[1]

    @property
    def users(self) -> list[Access]:
        """Who touched it."""
        return [*([self.write] if self.write is not None else ()), *self.reads.values()]


class _Watched(weakref.ref[Any]):
    """A storage that streams use, with the parts of it that were used apart from each other.

    `home` is the stream whose memory it is: freed, it goes to the next allocation there, unless it is the
    host's. `kept` are the streams that the allocator was told of (`record_stream`).
    """

    __slots__ = ("home", "kept", "key", "parts")
    key: int
    home: int
    parts: list[_Part]
    kept: set[int]

    def met(self, span: Span) -> list[_Part]:
        """The parts that a span meets."""
        return [part for part in self.parts if part.meets(span)]

    def part(self, span: Span) -> _Part:
        """The part of exactly this span."""
        for part in self.parts:
            if part.span == span:
                return part
        self.parts.append(_Part(span, None))
        return self.parts[-1]

    @property
    def users(self) -> list[Access]:
        """Who touched it."""
        return [access for part in self.parts for access in part.users]


class Clocks:
    """What each stream has seen of the others, and who touched which storage. `races` grows.

    `is_devices` tells of a storage whether it is the device's, and not pinned memory of the host.
    """

    def __init__(self, is_devices: Callable[[Any], bool]) -> None:
        self._is_devices = is_devices
        self.races: list[Race] = []
        self.last: Access | None = None
        self._seen: defaultdict[int, dict[int, int]] = defaultdict(dict)
        self._host: dict[int, int] = {}
        self._events: weakref.WeakKeyDictionary[Any, dict[int, int]] = weakref.WeakKeyDictionary()
        self._storages: dict[int, _Watched] = {}
        self._dead: list[_Watched] = []

    def issue(self, stream: int) -> Access:
        """An operator is queued: it runs after all that the host and the stream have waited for."""
        seen = self._seen[stream]
        _join(seen, self._host)
        seen[stream] = seen.get(stream, 0) + 1
        self.last = Access(stream, seen[stream])
        self._reuse(stream)
        return self.last

    def serial(self, stream: int) -> int:
        """Number of the newest operator of a stream."""
        return self._seen[stream].get(stream, 0)

    def has_seen(self, stream: int, other: int, serial: int) -> bool:
        """Whether what a stream gets from now on is behind an operator of another."""
        return max(self._seen[stream].get(other, 0), self._host.get(other, 0)) >= serial

    def read(self, uses: Iterable[Use], access: Access) -> list[int]:
        """An operator reads: the storages whose contents may not be there yet."""
        early = []
        for storage, span in uses:
            watched = self._watched(storage)
            if not all(self._ordered(part.write, access) for part in watched.met(span)):
                self.races.append(Race(READ, access))
                early.append(watched.key)
            watched.part(span).reads[access.stream] = access
        return early

    def write(self, uses: Iterable[Use], access: Access) -> None:
        """An operator writes."""
        for storage, span in uses:
            watched = self._watched(storage)
            others = (other for part in watched.met(span) for other in part.users)
            if not all(self._ordered(other, access) for other in others):
                self.races.append(Race(WRITE, access))
            watched.parts = [part for part in watched.parts if not part.is_within(span)]
            watched.parts.append(_Part(span, access))

    def make(self, storages: Iterable[Any], access: Access, *, on_device: bool) -> None:
        """An operator makes new storages, in the memory of its stream or of the host."""
        for storage in storages:
            watched = self._watch(storage, access.stream if on_device else _HOST)
            watched.parts = [_Part(WHOLE, access)]

    def keep(self, storage: Any, stream: int) -> None:
        """The allocator learns that a stream uses a storage."""
        self._watched(storage).kept.add(stream)

    def home(self, storage: Any) -> int:
        """The stream whose memory a storage is."""
        return self._watched(storage).home

    def is_kept(self, storage: Any, stream: int) -> bool:
        """Whether the allocator knows that a stream uses a storage."""
        return stream in self._watched(storage).kept

    def recorded(self, event: Any, stream: int) -> None:
        """An event is behind all that a stream has queued."""
        self._events[event] = {**self._host, **self._seen[stream]}

    def awaited(self, event: Any, stream: int) -> None:
        """What a stream gets from now on is behind an event."""
        _join(self._seen[stream], self._events.get(event, {}))

    def synchronized(self, subject: Any) -> None:
        """The host waited: for all (None), a stream's number, or an event."""
        if subject is None:
            for seen in list(self._seen.values()):
                _join(self._host, seen)
        elif isinstance(subject, int):
            _join(self._host, self._seen[subject])
        else:
            _join(self._host, self._events.get(subject, {}))

    def _ordered(self, earlier: Access | None, later: Access) -> bool:
        if earlier is None or earlier.stream == later.stream:
            return True
        return self._seen[later.stream].get(earlier.stream, 0) >= earlier.serial

    def _reuse(self, stream: int) -> None:
        """Memory of a stream that was freed is another's now: who used it without its knowledge?"""
        freed = [one for one in self._dead if one.home == stream]
        if not freed:
            return
        self._dead = [one for one in self._dead if one.home != stream]
        for watched in freed:
            late = (access for access in watched.users if access.stream not in watched.kept)
            for access in late:
                if self.last is not None and not self._ordered(access, self.last):
                    self.races.append(Race(FREE, access))

    def _watched(self, storage: Any) -> _Watched:
        """A storage that was made before, on the default stream if nobody saw where."""
        known = self._storages.get(storage._cdata)
        return known or self._watch(storage, 0 if self._is_devices(storage) else _HOST)

    def _watch(self, storage: Any, home: int) -> _Watched:
        watched = self._storages[storage._cdata] = _Watched(storage, self._died)
        watched.key, watched.home = storage._cdata, home
        watched.parts, watched.kept = [], set()
        return watched

    def _died(self, watched: _Watched) -> None:
        if self._storages.get(watched.key) is watched:
            del self._storages[watched.key]
            others = any(access.stream != watched.home for access in watched.users)
            if watched.home != _HOST and others:
                self._dead.append(watched)


def _join(into: dict[int, int], other: dict[int, int]) -> None:
    for stream, serial in other.items():
        if serial > into.get(stream, 0):
            into[stream] = serial
