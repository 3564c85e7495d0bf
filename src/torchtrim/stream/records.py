"""Dicts that stand in a tracking session where its own were, and know what left them."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, MutableMapping
from typing import Any, Protocol

from torchtrim.stream.frames import FrameSet
from torchtrim.stream.tombstones import Evicted, Tombstone


class Owner(Protocol):
    """Whoever bounds the session that the dicts are in."""

    def wrote(self, records: Records, frame: int) -> None:
        """A frame's record was written."""

    def absent(self, records: Records, frame: int) -> Any:
        """A frame that is not there was asked for. Raises `Evicted`, or returns what stands for it."""

    def lacks(self, record: Record, field: str) -> Any:
        """A field that is not there was read. Returns its value if it was spilled."""

    def cleared(self) -> None:
        """The session was reset."""

    def new_frame(self, frames: Frames, frame: int) -> None:
        """An image was given."""


class Record(dict[Any, Any]):
    """The fields of one frame of one object. A field that went raises `Evicted` when it is read."""

    __slots__ = ("frame", "records")

    def __init__(self, fields: dict[Any, Any], records: Records, frame: int) -> None:
        super().__init__(fields)
        self.records = records
        self.frame = frame

    def __missing__(self, field: str) -> Any:
        return self.records.owner.lacks(self, field)


class Records(dict[Any, Any]):
    """The records of one object by frame. Asking for one that went raises `Evicted`."""

    __slots__ = ("kind", "owner", "series")

    def __init__(
        self, frames: dict[Any, Any], owner: Owner, series: tuple[Hashable, ...], kind: str
    ) -> None:
        super().__init__()
        self.owner = owner
        self.series = series
        self.kind = kind
        for frame, fields in frames.items():
            self[frame] = fields

    def __setitem__(self, frame: int, fields: dict[Any, Any]) -> None:
        super().__setitem__(frame, Record(fields, self, frame))
        self.owner.wrote(self, frame)

    def get(self, frame: Any, default: Any = None) -> Any:
        """The record of a frame, `default` if there never was one. Raises `Evicted` if it went."""
        if frame in self:
            return self[frame]
        found = self.owner.absent(self, frame)
        return default if found is None else found

    def __missing__(self, frame: int) -> Any:
        found = self.owner.absent(self, frame)
        if found is None:
            raise KeyError(frame)
        return found


class Objects(dict[Any, Any]):
    """The records of all objects of a session: object -> kind -> frame -> field."""

    __slots__ = ("owner",)

    def __init__(self, objects: dict[Any, Any], owner: Owner) -> None:
        super().__init__()
        self.owner = owner
        for number, kinds in objects.items():
            self[number] = kinds

    def __setitem__(self, number: Hashable, kinds: dict[str, Any]) -> None:
        made = {
            kind: Records(frames, self.owner, (number, kind), kind)
            for kind, frames in kinds.items()
        }
        super().__setitem__(number, made)

    def clear(self) -> None:
        """Forget all objects."""
        super().clear()
        self.owner.cleared()


class Frames(dict[Any, Any]):
    """Images by frame. Its length is how many there ever were, for frames are numbered by it."""

    __slots__ = ("kept", "owner", "seen")

    def __init__(self, images: dict[int, Any] | None, owner: Owner) -> None:
        super().__init__(images or {})
        self.owner = owner
        self.kept = frozenset(images or {})
        self.seen = FrameSet()
        for frame in self.kept:
            self.seen.add(frame)

    def __len__(self) -> int:
        return len(self.seen)

    def __setitem__(self, frame: int, image: Any) -> None:
        super().__setitem__(frame, image)
        self.seen.add(frame)
        self.owner.new_frame(self, frame)

    def __missing__(self, frame: int) -> Any:
        known = self.seen.knows(frame)
        if known is False:
            raise KeyError(frame)
        raise Evicted(
            Tombstone(
                "image", frame, None, "an image goes when its frame ends", certain=bool(known)
            ),
            "Give the image again (frame=..., frame_idx=...), or allow corrections that far back with "
            "corrections=.",
        )


class TrackedObjects(dict[Any, Any]):
    """Which frames each object was tracked in."""

    def __init__(self, objects: dict[Any, Any]) -> None:
        super().__init__()
        for number, frames in objects.items():
            self[number] = frames

    def __setitem__(self, number: Hashable, frames: Any) -> None:
        super().__setitem__(number, Tracked(frames))


class Tracked(MutableMapping[int, dict[str, bool]]):
    """Frames that were tracked and in which direction, as ranges: what a session only asks `in` of."""

    def __init__(self, frames: MutableMapping[int, dict[str, bool]]) -> None:
        self._all, self._reverse = FrameSet(), FrameSet()
        self.update(frames)

    def __contains__(self, frame: object) -> bool:
        known = self._all.knows(frame) if isinstance(frame, int) else False
        if known is None:
            raise Evicted(
                Tombstone("tracked", frame, None, "too many gaps to remember", certain=False),
                "The stream skipped frames in too many places to tell whether this one was tracked.",
            )
        return known

    def __getitem__(self, frame: int) -> dict[str, bool]:
        if frame not in self:
            raise KeyError(frame)
        return {"reverse": self._reverse.knows(frame) is True}

    def __setitem__(self, frame: int, how: dict[str, bool]) -> None:
        self._all.add(frame)
        if how.get("reverse"):
            self._reverse.add(frame)

    def __delitem__(self, frame: int) -> None:
        raise TypeError("what was tracked stays tracked until the session is reset")

    def __iter__(self) -> Iterator[int]:
        return self._all.frames()

    def __len__(self) -> int:
        return len(self._all)
