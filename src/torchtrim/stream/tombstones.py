"""Tombstones of evicted entries, in bounded memory, and image containers that evict."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any

import torch

from torchtrim.errors import TorchtrimError
from torchtrim.stream.frames import FrameSet


class Frames(dict[Any, Any]):
    """Images by frame. The length counts evicted images too, since callers number frames by it.

    Images present at the start (`kept`) stay.
    """

    __slots__ = ("kept", "seen", "tell")

    def __init__(self, images: dict[int, Any] | None, tell: Callable[[int], None]) -> None:
        super().__init__(images or {})
        self.tell = tell
        self.kept = frozenset(images or {})
        self.seen = FrameSet()
        for frame in sorted(self.kept):
            self.seen.add(frame)

    def __len__(self) -> int:
        return len(self.seen)

    def __setitem__(self, frame: int, image: Any) -> None:
        super().__setitem__(frame, image)
        self.seen.add(frame)
        if frame not in self.kept:
            self.tell(frame)

    def __missing__(self, frame: int) -> Any:
        known = self.seen.knows(frame)
        if known is False:
            raise KeyError(frame)
        why = "images are evicted when their frame ends"
        raise Evicted(
            Tombstone("image", frame, None, why, certain=bool(known)),
            "Pass the image again (frame=..., frame_idx=...), or bind with a larger corrections=.",
        )


class LoadedFrames:
    """Wraps a loader that keeps every image it has read, and evicts those of past frames.

    `source[n]` reads image n and keeps it in `source.images[n]`. An evicted image is read again on demand.
    float64 images are stored as float32, since the model converts them anyway.
    """

    def __init__(self, source: Any) -> None:
        self.source = source
        self._read: set[int] = set()

    def __getitem__(self, frame: int) -> torch.Tensor:
        image = self.source[frame]
        if image.dtype is torch.float64:
            image = self.source.images[frame] = image.float()
        self._read.add(frame)
        assert isinstance(image, torch.Tensor)
        return image

    def __len__(self) -> int:
        return len(self.source)

    def drop(self, distance: Callable[[int], int], corrections: int) -> None:
        """Evict images of frames whose distance is above `corrections`."""
        for frame in [frame for frame in self._read if distance(frame) > corrections]:
            self.source.images[frame] = None
            self._read.discard(frame)


Key = tuple[str, Hashable]


@dataclass(frozen=True, slots=True)
class Tombstone:
    """A record of an evicted entry.

    `when` is the frame at eviction, or `None` if no longer known. `freed` is the number of bytes freed; if
    it is 0, `pinned_by` names entries that still hold the same storage. `certain` is false if the bounded
    bookkeeping only knows that the entry may have existed.
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
    """Read of an evicted entry. `tombstone` describes the entry and gives the time and reason."""

    def __init__(self, tombstone: Tombstone, fix: str = "") -> None:
        self.tombstone = tombstone
        advice = fix or "Declare a longer lifetime for this field; `learn_state` measures how long."
        super().__init__(f"{tombstone} {advice}")

    def __str__(self) -> str:
        return str(self.args[0])


class Newest(OrderedDict[Any, Any]):
    """An ordered dict for the newest `maxlen` items; the code that adds items removes the oldest."""

    def __init__(self, maxlen: int) -> None:
        super().__init__()
        self.maxlen = maxlen


class Graveyard:
    """The newest `most` tombstones in full, older ones as ranges of frames per series."""

    def __init__(self, most: int) -> None:
        self._recent = Newest(most)
        self._older: dict[tuple[str, Hashable], FrameSet] = {}

    def bury(
        self, key: Key, when: int | None, why: str, freed: int, pinned_by: tuple[Key, ...]
    ) -> None:
        """Record an evicted entry with the facts of its tombstone."""
        recent = self._recent
        recent.pop(key, None)
        recent[key] = (when, why, freed, pinned_by)
        if len(recent) > recent.maxlen:
            (field, entry), _ = recent.popitem(last=False)
            series, frame = split(entry)
            if frame is not None:
                self._older.setdefault((field, series), FrameSet()).add(frame)

    def find(self, key: Key) -> Tombstone | None:
        """Return the tombstone of an entry, or `None`."""
        if key in self._recent:
            return Tombstone(*key, *self._recent[key])
        series, frame = split(key[1])
        older = self._older.get((key[0], series))
        if older is None or frame is None or (known := older.knows(frame)) is False:
            return None
        return Tombstone(*key, None, "its lifetime was over", certain=known is True)

    def recent(self) -> list[Tombstone]:
        """Return the newest tombstones, oldest first."""
        return [Tombstone(*key, *facts) for key, facts in self._recent.items()]

    def forget(self, series: Hashable) -> None:
        """Remove the tombstones of a series."""
        for key in [key for key in self._recent if split(key[1])[0] == series]:
            del self._recent[key]
        for key in [key for key in self._older if key[1] == series]:
            del self._older[key]

    def clear(self) -> None:
        """Remove all tombstones."""
        self._recent.clear()
        self._older.clear()

    def __len__(self) -> int:
        """Return the number of full records and ranges."""
        return len(self._recent) + sum(older.ranges for older in self._older.values())


def split(entry: Hashable) -> tuple[Hashable, int | None]:
    """Return an entry's series and frame: `7` is frame 7, `(2, 7)` is frame 7 of series `(2,)`."""
    if isinstance(entry, int):
        return None, entry
    if isinstance(entry, tuple) and entry and isinstance(entry[-1], int):
        return entry[:-1], entry[-1]
    return entry, None


def name_of(key: Key) -> str:
    """Format a key for messages: `("pointer", (2, 7))` is `'pointer' of frame 7 of 2`."""
    field, entry = key
    series, frame = split(entry)
    words = f"{field!r}" if frame is None else f"{field!r} of frame {frame}"
    if series is not None:
        inside = ", ".join(map(str, series)) if isinstance(series, tuple) else str(series)
        words += f" of {inside}"
    return words
