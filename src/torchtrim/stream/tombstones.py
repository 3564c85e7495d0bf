"""What is left of an evicted entry: what it was, when it went and why; bounded however long the stream."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

from torchtrim.errors import TorchtrimError
from torchtrim.stream.frames import FrameSet

Key = tuple[str, Hashable]
_Facts = tuple[int | None, str, int, tuple[Key, ...]]


@dataclass(frozen=True, slots=True)
class Tombstone:
    """An entry that is gone.

    `when` is the frame that the stream was at, `None` where it was forgotten. `freed` is the bytes
    that going freed; 0 with `pinned_by` says which entries still hold the same storage. `certain` is
    false where the bounded bookkeeping only knows that it may have been there.
    """

    field: str
    entry: Hashable
    when: int | None
    why: str
    freed: int = 0
    pinned_by: tuple[Key, ...] = ()
    certain: bool = True

    def __str__(self) -> str:
        at = "earlier" if self.when is None else f"at frame {self.when}"
        may = "was evicted" if self.certain else "may have been evicted"
        held = ""
        if self.pinned_by:
            names = ", ".join(name_of(key) for key in self.pinned_by[:3])
            held = f" It freed nothing: {names} hold the same storage."
        return f"{name_of((self.field, self.entry))} {may} {at}: {self.why}.{held}"


class Evicted(TorchtrimError, KeyError):
    """Reading what is no longer there. `tombstone` says what it was, when it went and why."""

    def __init__(self, tombstone: Tombstone, fix: str = "") -> None:
        self.tombstone = tombstone
        advice = fix or (
            "Whoever reads it needs a longer lifetime for this field; `learn_state` measures which."
        )
        super().__init__(f"{tombstone} {advice}")

    def __str__(self) -> str:
        return str(self.args[0])


class Newest(OrderedDict[Any, Any]):
    """What is known of the newest that went: at most `maxlen` are kept, by whoever fills it."""

    def __init__(self, maxlen: int) -> None:
        super().__init__()
        self.maxlen = maxlen


class Graveyard:
    """The newest `most` tombstones in full, older ones as ranges of frames for each series of entries."""

    def __init__(self, most: int) -> None:
        self._recent = Newest(most)
        self._older: dict[tuple[str, Hashable], FrameSet] = {}

    def bury(
        self, key: Key, when: int | None, why: str, freed: int, pinned_by: tuple[Key, ...]
    ) -> None:
        """Remember an entry that went, with what its tombstone is to say."""
        recent = self._recent
        if key in recent:
            del recent[key]
        recent[key] = (when, why, freed, pinned_by)
        if len(recent) > recent.maxlen:
            (field, entry), _ = recent.popitem(last=False)
            series, frame = split(entry)
            if frame is not None:
                older = self._older.get((field, series))
                if older is None:
                    older = self._older[field, series] = FrameSet()
                older.add(frame)

    def find(self, key: Key) -> Tombstone | None:
        """The tombstone of an entry, `None` if none is known."""
        found = self._recent.get(key)
        if found is not None:
            return _stone(key, found)
        series, frame = split(key[1])
        older = self._older.get((key[0], series))
        if older is None or frame is None:
            return None
        known = older.knows(frame)
        if known is False:
            return None
        return Tombstone(*key, None, "its lifetime was over", certain=known is True)

    def recent(self) -> list[Tombstone]:
        """The newest tombstones, oldest first."""
        return [_stone(key, facts) for key, facts in self._recent.items()]

    def forget(self, series: Hashable) -> None:
        """Forget a series."""
        for key in [key for key in self._recent if split(key[1])[0] == series]:
            del self._recent[key]
        for field, other in [one for one in self._older if one[1] == series]:
            del self._older[field, other]

    def clear(self) -> None:
        """Forget all."""
        self._recent.clear()
        self._older.clear()

    def __len__(self) -> int:
        """How many records it keeps: full ones and ranges."""
        return len(self._recent) + sum(older.ranges for older in self._older.values())


def _stone(key: Key, facts: _Facts) -> Tombstone:
    when, why, freed, pinned_by = facts
    return Tombstone(key[0], key[1], when, why, freed, pinned_by)


def split(entry: Hashable) -> tuple[Hashable, int | None]:
    """An entry's series and frame: `7` is frame 7, `(2, 7)` is frame 7 of series `(2,)`."""
    if isinstance(entry, int):
        return None, entry
    if isinstance(entry, tuple) and entry and isinstance(entry[-1], int):
        return entry[:-1], entry[-1]
    return entry, None


def name_of(key: Key) -> str:
    """`("pointer", (2, 7))` -> `'pointer' of frame 7 of 2`, for messages."""
    field, entry = key
    series, frame = split(entry)
    words = f"{field!r}"
    if frame is not None:
        words += f" of frame {frame}"
    if series is not None:
        inside = ", ".join(map(str, series)) if isinstance(series, tuple) else str(series)
        words += f" of {inside}"
    return words
