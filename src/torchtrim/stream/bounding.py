"""Base class of bounded sessions and predictors: adopts new records, evicts old ones, reports late reads."""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Iterator, Mapping
from typing import Any

from torchtrim.errors import Unsupported
from torchtrim.stream.lifetimes import bounded, is_unbounded
from torchtrim.stream.records import Record, Records, Tracked
from torchtrim.stream.store import StateStore
from torchtrim.stream.tombstones import Evicted, Tombstone

CONDITIONING, OTHER = "cond_frame_outputs", "non_cond_frame_outputs"
_ADVICE = (
    "The unbounded state would still have it, so continuing would change the result. To go back N frames, "
    "bind with corrections=N; to change direction at prompts, bind with turns=True."
)


class Bounding:
    """A tracker's records, bounded by a store.

    `store` holds the entries and tombstones. `missed` counts reads of evicted entries, and
    `first_missed` is the frame of the first: both stay 0 and `None` unless `keep` is below the live set.
    """

    pointer = "object_pointer"
    live: tuple[str, ...] = ()

    def __init__(self, store: StateStore, *, turns: bool, strict: bool) -> None:
        self.store = store
        bounded.add(type(self).__name__)
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
        """See `Owner`."""
        return (f"object {number}", next(self._serial))

    def wrote(self, records: Records, frame: int) -> None:
        """See `Owner`."""
        self._touched[id(records), frame] = records, frame
        if records.kind == CONDITIONING and self._turns:
            self.store.anchor(frame)

    def absent(self, records: Records, frame: int, *, must: bool) -> Any:
        """See `Owner`."""
        tombstone = self.store.tombstone(
            (f"{records.kind}.{self.pointer}", (*records.series, frame))
        )
        if tombstone is None:
            return
        if self._strict:
            raise Evicted(tombstone, _ADVICE)
        self.missed += 1
        if self.first_missed is None:
            self.first_missed = self.store.now if self._reading is None else self._reading

    def lacks(self, record: Record, field: str) -> Any:
        """See `Owner`."""
        key = (f"{record.records.kind}.{field}", (*record.records.series, record.frame))
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
        """See `Owner`."""
        entry = (*record.records.series, record.frame)
        return self.store.recall((f"{record.records.kind}.{field}", entry))

    def took(self, records: Records, record: Record) -> None:
        """See `Owner`."""
        entry = (*records.series, record.frame)
        self._touched.pop((id(records), record.frame), None)
        self._moved |= records.kind == CONDITIONING
        for name in self.store.fields:
            kind, _, _ = name.partition(".")
            if kind == records.kind:
                self.store.forget((name, entry))

    def cleared(self) -> None:
        """See `Owner`."""
        self._touched.clear()
        self._parted.clear()
        self.store.reset()

    def parted(self, kinds: Mapping[str, Records]) -> None:
        """See `Owner`."""
        self._parted += [one for one in kinds.values() if isinstance(one, Records)]

    def settle(self) -> None:
        """See `Owner`. Also drops the entries, tombstones and anchors of removed objects."""
        parted, self._parted = self._parted, []
        if not parted:
            return
        there = {id(records) for kinds in self.objects() for records in kinds.values()}
        for records in parted:
            if id(records) not in there and not records.dropped:
                records.dropped = self._moved = True
                for frame in records:
                    self._touched.pop((id(records), frame), None)
                self.store.drop(records.series)

    def tracked(self, frames: Tracked, frame: int) -> None:
        """See `Owner`."""

    def _prompted(self) -> Iterator[Records]:
        return (kinds[CONDITIONING] for kinds in self.objects() if CONDITIONING in kinds)

    def _adopt(self, records: Records, record: Record) -> None:
        kind, entry = records.kind, (*records.series, record.frame)
        fields = self.store.fields
        gone = []
        for field in record:
            name = self._names.get((kind, field))
            if name is None:
                name = self._names[kind, field] = f"{kind}.{field}"
            lifetime = fields.get(name)
            if lifetime is not None and lifetime.kind == "volatile":
                gone.append(field)
                continue
            if lifetime is None:
                raise Unsupported(
                    f"the record of frame {record.frame} has a field {field!r} that this adapter does not "
                    "know, so it cannot tell when the field is read. Nothing of this frame was evicted. "
                    "Call release() to run the state unbounded."
                )
            self.store.adopt((name, entry), record, field)
        for field in gone:
            del record[field]

    def _drop_empty(self) -> None:
        for records in self.tables():
            for frame in [frame for frame, record in records.items() if not record]:
                entry = (*records.series, frame)
                if not any((f"{OTHER}.{field}", entry) in self.store for field in self.live):
                    dict.pop(records, frame)
