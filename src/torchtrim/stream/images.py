"""Images by frame that go when their frame is done."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from torchtrim.stream.frames import FrameSet
from torchtrim.stream.tombstones import Evicted, Tombstone


class Frames(dict[Any, Any]):
    """Images by frame. Its length is how many there ever were, for frames are numbered by it.

    Those that were there at the start, `kept`, stay.
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
        raise Evicted(
            Tombstone(
                "image", frame, None, "an image goes when its frame ends", certain=bool(known)
            ),
            "Give the image again (frame=..., frame_idx=...), or allow corrections that far back with "
            "corrections=.",
        )


class LoadedFrames:
    """A loader that keeps each image it ever read, with those of past frames let go.

    `source` reads image n at `source[n]` and keeps it in `source.images[n]`. An image that went is read
    again when it is asked for. float64 images are kept as float32, which is what the model makes of them.
    """

    def __init__(self, source: Any) -> None:
        self.source = source
        self._read: set[int] = set()

    def __getitem__(self, frame: int) -> torch.Tensor:
        image = self.source[frame]
        if image.dtype is torch.float64:
            image = image.float()
            self.source.images[frame] = image
        self._read.add(frame)
        assert isinstance(image, torch.Tensor)
        return image

    def __len__(self) -> int:
        return len(self.source)

    def drop(self, distance: Callable[[int], int], corrections: int) -> None:
        """Let go the images that were read of frames further away than that."""
        for frame in [frame for frame in self._read if distance(frame) > corrections]:
            self.source.images[frame] = None
            self._read.discard(frame)
