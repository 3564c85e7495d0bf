"""A memory snapshot of PyTorch's CUDA caching allocator, as it was written."""

from __future__ import annotations

from typing import Any, Literal

import msgspec
from msgspec import Struct

Action = Literal[
    "alloc",
    "free_requested",
    "free_completed",
    "segment_alloc",
    "segment_free",
    "segment_map",
    "segment_unmap",
    "snapshot",
    "oom",
    "user_defined",
]


class Frame(Struct, frozen=True):
    """A call of a stack, innermost first. `line` is 0 for compiled code."""

    filename: str = ""
    line: int = 0
    name: str = ""


class SnapshotBlock(Struct):
    """A block of a segment, in use if its state begins with `active`. `frames` are read by `frames_of`."""

    size: int
    state: str
    address: int = -1
    requested_size: int = 0
    frames: Any = None

    @property
    def active(self) -> bool:
        """True if it cannot be given away."""
        return self.state.startswith("active")


class SnapshotSegment(Struct):
    """Memory that the allocator holds from the device."""

    address: int
    total_size: int
    device: int = 0
    stream: int = 0
    segment_type: str = "large"
    segment_pool_id: tuple[int, int] = (0, 0)
    is_expandable: bool = False
    blocks: list[SnapshotBlock] = []


class SnapshotEvent(Struct):
    """An event of the allocator. `device_free`, of an `oom` only: bytes that the device had left."""

    action: str
    addr: int = 0
    size: int = 0
    stream: int = 0
    time_us: int = 0
    device_free: int | None = None
    frames: Any = None


class Snapshot(Struct):
    """All segments at the moment of writing, and the last events of each device, oldest first."""

    segments: list[SnapshotSegment]
    device_traces: list[list[SnapshotEvent]] = []
    allocator_settings: dict[str, Any] = {}

    @property
    def conf(self) -> str:
        """The value of `PYTORCH_CUDA_ALLOC_CONF` of the process, empty if it is not known."""
        return str(self.allocator_settings.get("PYTORCH_CUDA_ALLOC_CONF") or "")


def frames_of(entry: SnapshotBlock | SnapshotEvent) -> list[Frame]:
    """Return the stack of an event or a block, innermost first; anything but a frame is left out."""
    if not isinstance(entry.frames, list):
        return []
    found = []
    for frame in entry.frames[:_MOST_FRAMES]:
        try:
            found.append(msgspec.convert(frame, Frame))
        except msgspec.ValidationError:
            continue
    return found


_MOST_FRAMES = 400  # Of a stack; PyTorch itself writes fewer.
