"""Dicts that replace those in a tracker's state and report writes, removals and reads of evicted entries."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, MutableMapping
from typing import Any, Protocol

from torchtrim.stream.frames import FrameSet, Routed
from torchtrim.stream.tombstones import Evicted, Tombstone


class Owner(Protocol):
    """The object that bounds the state and is notified by its dicts."""

    def series(self, number: Hashable) -> tuple[Hashable, ...]:
        """Return a unique name for the records of an object."""

    def wrote(self, records: Records, frame: int) -> None:
        """A frame's record was written."""

    def absent(self, records: Records, frame: int, *, must: bool) -> Any:
        """Handle a lookup of an absent frame. Raises `Evicted`, or returns a placeholder."""

    def lacks(self, record: Record, field: str) -> Any:
        """Handle a read of an absent field. Returns its value if it was spilled."""

    def recalls(self, record: Record, field: str) -> bool:
        """Restore a field. Return True if it was spilled."""

    def took(self, records: Records, record: Record) -> None:
        """A record was removed."""

    def cleared(self) -> None:
        """The state was reset."""

    def parted(self, kinds: Mapping[str, Records]) -> None:
        """An object was removed from the state; it may be added again under another number."""

    def settle(self) -> None:
        """Drop the objects that were removed and not added again."""

    def tracked(self, frames: Tracked, frame: int) -> None:
        """An object, identified by its frames, was tracked in another frame."""


class Record(dict[Any, Any]):
    """The fields of one frame of one object. Reading an evicted field raises `Evicted`."""

    __slots__ = ("frame", "records")

    def __init__(self, fields: dict[Any, Any], records: Records, frame: int) -> None:
        super().__init__(fields)
        self.records = records
        self.frame = frame

    def __missing__(self, field: str) -> Any:
        return self.records.owner.lacks(self, field)

    def get(self, field: Any, default: Any = None) -> Any:
        """Return the value of a field, restored if it was spilled, or `default` if absent."""
        if field in self or self.records.owner.recalls(self, field):
            return self[field]
        return default


class Records(Routed):
    """The records of one object by frame. Reading an evicted one raises `Evicted`."""

    __slots__ = ("dropped", "kind", "owner", "series")

    def __init__(
        self, frames: dict[Any, Any], owner: Owner, series: tuple[Hashable, ...], kind: str
    ) -> None:
        super().__init__()
        self.owner = owner
        self.series = series
        self.kind = kind
        self.dropped = False
        for frame, fields in frames.items():
            self[frame] = fields

    def __setitem__(self, frame: int, fields: dict[Any, Any]) -> None:
        # A rewritten frame keeps its position, the order in which memories are read.
        if frame in self:
            self.owner.took(self, self[frame])
        super().__setitem__(frame, Record(fields, self, frame))
        self.owner.wrote(self, frame)

    def get(self, frame: Any, default: Any = None) -> Any:
        """Return a frame's record, or `default` if it never had one. Raises `Evicted` if it was evicted."""
        if frame in self:
            return self[frame]
        found = self.owner.absent(self, frame, must=False)
        return default if found is None else found

    def __missing__(self, frame: int) -> Any:
        found = self.owner.absent(self, frame, must=True)
        if found is None:
            raise KeyError(frame)
        return found

    def pop(self, frame: Any, *default: Any) -> Any:
        """Remove and return a whole record."""
        if frame in self:
            self.owner.took(self, self[frame])
        return super().pop(frame, *default)

    def back(self) -> Records:
        """Return itself to the state. If it was dropped, all its frames count as written again."""
        if self.dropped:
            self.dropped = False
            for frame in self:
                self.owner.wrote(self, frame)
        return self

    def plain(self) -> dict[Any, Any]:
        """Return a copy in plain dicts."""
        return {frame: dict(record) for frame, record in self.items()}


class Objects(Routed):
    """The records of all objects of a state: object -> kind -> frame -> field.

    Objects may be removed, added again and renumbered; `update` completes such a change.
    """

    __slots__ = ("owner",)

    def __init__(self, objects: dict[Any, Any], owner: Owner) -> None:
        super().__init__()
        self.owner = owner
        for number, kinds in objects.items():
            self[number] = kinds

    def __setitem__(self, number: Hashable, kinds: dict[str, Any]) -> None:
        if number in self:
            self.owner.parted(self[number])
        super().__setitem__(number, wrapped(kinds, self.owner, number))

    def pop(self, number: Any, *default: Any) -> Any:
        """Remove and return an object."""
        kinds = super().pop(number, *default)
        if isinstance(kinds, dict):
            self.owner.parted(kinds)
        return kinds

    def update(self, *others: Any, **more: Any) -> None:
        """Add objects, and drop those that were removed before and are not among them."""
        super().update(*others, **more)
        self.owner.settle()

    def clear(self) -> None:
        """Remove all objects."""
        for kinds in self.values():
            for records in kinds.values():
                records.dropped = True
        dict.clear(self)
        self.owner.cleared()

    def plain(self) -> dict[Any, Any]:
        """Return a copy in plain dicts."""
        return {
            number: {kind: records.plain() for kind, records in kinds.items()}
            for number, kinds in self.items()
        }


def wrapped(kinds: dict[str, Any], owner: Owner, number: Hashable) -> dict[str, Records]:
    """Wrap the records of an object, by kind, in `Records`."""
    series = owner.series(number)
    return {
        kind: frames.back() if isinstance(frames, Records) else Records(frames, owner, series, kind)
        for kind, frames in kinds.items()
    }


class TrackedObjects(Routed):
    """The frames in which each object was tracked."""

    __slots__ = ("owner",)

    def __init__(self, objects: dict[Any, Any], owner: Owner) -> None:
        super().__init__()
        self.owner = owner
        for number, frames in objects.items():
            self[number] = frames

    def __setitem__(self, number: Hashable, frames: Any) -> None:
        made = frames if isinstance(frames, Tracked) else Tracked(frames, self.owner)
        super().__setitem__(number, made)

    def plain(self) -> dict[Any, Any]:
        """Return a copy in plain dicts."""
        return {number: dict(frames) for number, frames in self.items()}


class Tracked(MutableMapping[int, dict[str, bool]]):
    """Tracked frames with their last direction, stored as ranges."""

    def __init__(self, frames: Any, owner: Owner) -> None:
        self._all, self._reverse = FrameSet(), FrameSet()
        self._owner = owner
        for frame, how in frames.items():
            self._add(frame, how)

    def _add(self, frame: int, how: dict[str, bool]) -> None:
        self._all.add(frame)
        if how.get("reverse"):
            self._reverse.add(frame)
        elif len(self._reverse):
            self._reverse.discard(frame)

    def __contains__(self, frame: object) -> bool:
        known = self._all.knows(frame) if isinstance(frame, int) else False
        if known is None:
            raise Evicted(
                Tombstone("tracked", frame, None, "too many gaps to remember", certain=False),
                "The stream skipped frames in too many places to know if this one was tracked.",
            )
        return known

    def __getitem__(self, frame: int) -> dict[str, bool]:
        if frame not in self:
            raise KeyError(frame)
        return {"reverse": self._reverse.knows(frame) is True}

    def __setitem__(self, frame: int, how: dict[str, bool]) -> None:
        self._add(frame, how)
        self._owner.tracked(self, frame)

    def __delitem__(self, frame: int) -> None:
        if frame not in self:
            raise KeyError(frame)
        self._all.discard(frame)
        self._reverse.discard(frame)

    def clear(self) -> None:
        """Remove all frames."""
        self._all.clear()
        self._reverse.clear()

    def __iter__(self) -> Iterator[int]:
        return self._all.frames()

    def __len__(self) -> int:
        return len(self._all)
