"""Bounded state of trackers: dicts that report writes, removals and late reads, and their owner."""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Iterator, Mapping, MutableMapping
from typing import Any

from torchtrim.errors import Unsupported
from torchtrim.stream.frames import FrameSet, Routed
from torchtrim.stream.lifetimes import bounded, is_unbounded
from torchtrim.stream.store import StateStore
from torchtrim.stream.tombstones import Evicted, Key, Tombstone

CONDITIONING, OTHER = "cond_frame_outputs", "non_cond_frame_outputs"
_ADVICE = (
    "The unbounded state would still have it, so continuing would change the result. To go back N frames, "
    "bind with corrections=N; to change direction at prompts, bind with turns=True."
)


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
        self, frames: dict[Any, Any], owner: Bounding, series: tuple[Hashable, ...], kind: str
    ) -> None:
        super().__init__()
        self.owner = owner
        self.series = series
        self.kind = kind
        self.dropped = False
        self.update(frames)

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
        record = self.owner.absent(self, frame, must=False)
        return default if record is None else record

    def __missing__(self, frame: int) -> Any:
        record = self.owner.absent(self, frame, must=True)
        if record is None:
            raise KeyError(frame)
        return record

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

    def key(self, frame: int, field: str) -> Key:
        """Return the store's key of a field of a frame's record."""
        return f"{self.kind}.{field}", (*self.series, frame)

    def plain(self) -> dict[Any, Any]:
        """Return a copy in plain dicts."""
        return {frame: dict(record) for frame, record in self.items()}


class Objects(Routed):
    """The records of all objects of a state: object -> kind -> frame -> field.

    Objects may be removed, added again and renumbered; `update` completes such a change.
    """

    __slots__ = ("owner",)

    def __init__(self, objects: dict[Any, Any], owner: Bounding) -> None:
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
        """Add objects, and drop the objects that were removed before and not added again."""
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


def wrapped(kinds: dict[str, Any], owner: Bounding, number: Hashable) -> dict[str, Records]:
    """Wrap the records of an object, by kind, in `Records`."""
    series = owner.series(number)
    return {
        kind: frames.back() if isinstance(frames, Records) else Records(frames, owner, series, kind)
        for kind, frames in kinds.items()
    }


class TrackedObjects(Routed):
    """The tracked frames of each object."""

    __slots__ = ("owner",)

    def __init__(self, objects: dict[Any, Any], owner: Bounding) -> None:
        super().__init__()
        self.owner = owner
        self.update(objects)

    def __setitem__(self, number: Hashable, frames: Any) -> None:
        tracked = frames if isinstance(frames, Tracked) else Tracked(frames, self.owner)
        super().__setitem__(number, tracked)

    def plain(self) -> dict[Any, Any]:
        """Return a copy in plain dicts."""
        return {number: dict(frames) for number, frames in self.items()}


class Tracked(MutableMapping[int, dict[str, bool]]):
    """Tracked frames with their last direction, stored as ranges."""

    def __init__(self, frames: Any, owner: Bounding) -> None:
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


class Bounding:
    """A tracker's records, bounded by a store.

    `store` holds the entries and tombstones. `missed` counts reads of evicted entries, and
    `first_missed` is the frame of the first: both stay 0 and `None` unless `keep` is below the live set.
    """

    pointer = "object_pointer"
    live: tuple[str, ...] = ()

    def __init__(self, store: StateStore, *, turns: bool, strict: bool) -> None:
        bounded.add(type(self).__name__)
        self.store = store
        self.missed = 0
        self.first_missed: int | None = None
        self._turns = turns
        self._strict = strict
        self._reading: int | None = None
        self._touched: dict[tuple[int, int], tuple[Records, int]] = {}
        self._parted: list[Records] = []
        self._moved = False
        self._serial = itertools.count()
        self._names: dict[tuple[str, str], str] = {}

    def end_frame(self, frame: int) -> None:
        """End a frame: evict everything that no later frame reads.

        Raises `Unsupported` if a record has a field that this adapter does not know.
        """
        self.settle()
        self.store.advance(frame)
        touched, self._touched = list(self._touched.values()), {}
        if is_unbounded():
            return
        if self._turns and self._moved:
            self._moved = False
            self.store.anchors(one for records in self._prompted() for one in records)
        for records, written in touched:
            record = dict.get(records, written)
            if record is not None:
                self._adopt(records, record)
        self.before_end(frame, touched)
        self.store.end()
        self._reading = None
        self._drop_empty()

    def before_end(self, frame: int, touched: list[tuple[Records, int]]) -> None:
        """Hook for subclasses, called before a frame ends with the records written in it."""

    def objects(self) -> Iterator[Mapping[str, Records]]:
        """The records of each object by kind, then those of all objects together if the state has them."""
        return iter(())

    def tables(self) -> Iterator[Records]:
        """The records of all frames except conditioning frames."""
        return (kinds[OTHER] for kinds in self.objects() if OTHER in kinds)

    def series(self, number: Hashable) -> tuple[Hashable, ...]:
        """Return a unique name for the records of an object."""
        return (f"object {number}", next(self._serial))

    def wrote(self, records: Records, frame: int) -> None:
        """Note a written record; a written conditioning frame becomes an anchor with `turns`."""
        self._touched[id(records), frame] = records, frame
        if records.kind == CONDITIONING and self._turns:
            self.store.anchor(frame)

    def absent(self, records: Records, frame: int, *, must: bool) -> Any:
        """Handle a lookup of an absent frame: raise `Evicted`, or return a placeholder or `None`."""
        tombstone = self.store.tombstone(records.key(frame, self.pointer))
        if tombstone is None:
            return
        if self._strict:
            raise Evicted(tombstone, _ADVICE)
        self.missed += 1
        if self.first_missed is None:
            self.first_missed = self.store.now if self._reading is None else self._reading

    def lacks(self, record: Record, field: str) -> Any:
        """Return the value of an absent field if it was spilled, else raise `Evicted` or `KeyError`."""
        key = record.records.key(record.frame, field)
        if key[0] not in self.store.fields:
            raise KeyError(field)
        if self.store.recall(key):
            return record[field]
        tombstone = self.store.tombstone(key)
        if record.records.dropped:
            tombstone = Tombstone(*key, None, "its object was removed")
        if self.store.fields[key[0]].kind == "volatile":
            tombstone = Tombstone(*key, record.frame, f"{key[0]} is volatile and its frame ended")
        if tombstone is None:
            raise KeyError(field)
        raise Evicted(tombstone, _ADVICE)

    def recalls(self, record: Record, field: str) -> bool:
        """Restore a field. Return True if it was spilled."""
        return self.store.recall(record.records.key(record.frame, field))

    def took(self, records: Records, record: Record) -> None:
        """Stop managing a removed record."""
        entry = (*records.series, record.frame)
        self._touched.pop((id(records), record.frame), None)
        self._moved |= records.kind == CONDITIONING
        for name in self.store.fields:
            kind, _, _ = name.partition(".")
            if kind == records.kind:
                self.store.forget((name, entry))

    def cleared(self) -> None:
        """Reset the store along with the state."""
        self._touched.clear()
        self._parted.clear()
        self.store.reset()

    def parted(self, kinds: Mapping[str, Records]) -> None:
        """Note a removed object, which may be added again under another number."""
        self._parted += [records for records in kinds.values() if isinstance(records, Records)]

    def settle(self) -> None:
        """Drop removed objects that were not added again: entries, tombstones and anchors."""
        parted, self._parted = self._parted, []
        if not parted:
            return
        present = {id(records) for kinds in self.objects() for records in kinds.values()}
        for records in parted:
            if id(records) not in present and not records.dropped:
                records.dropped = self._moved = True
                for frame in records:
                    self._touched.pop((id(records), frame), None)
                self.store.drop(records.series)

    def tracked(self, frames: Tracked, frame: int) -> None:
        """Hook for subclasses, called when an object, identified by its frames, was tracked again."""

    def _prompted(self) -> Iterator[Records]:
        return (kinds[CONDITIONING] for kinds in self.objects() if CONDITIONING in kinds)

    def _adopt(self, records: Records, record: Record) -> None:
        kind, entry = records.kind, (*records.series, record.frame)
        fields = self.store.fields
        evicted = []
        for field in record:
            name = self._names.get((kind, field))
            if name is None:
                name = self._names[kind, field] = f"{kind}.{field}"
            lifetime = fields.get(name)
            if lifetime is not None and lifetime.kind == "volatile":
                evicted.append(field)
                continue
            if lifetime is None:
                raise Unsupported(
                    f"the record of frame {record.frame} has a field {field!r} that this adapter does not "
                    "know, so it cannot tell when the field is read. The whole frame stays in memory. "
                    "Call release() to run the state unbounded."
                )
            self.store.adopt((name, entry), record, field)
        for field in evicted:
            del record[field]

    def _drop_empty(self) -> None:
        for records in self.tables():
            for frame in [frame for frame, record in records.items() if not record]:
                if not any(records.key(frame, field) in self.store for field in self.live):
                    dict.pop(records, frame)
