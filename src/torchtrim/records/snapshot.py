"""A memory snapshot of PyTorch's CUDA caching allocator, as it was written."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct

Bytes = Annotated[int, Meta(ge=0, le=2**40)]
"""Bytes of one block, segment or request: several times those of a device, and a range of pages."""
Number = Annotated[int, Meta(ge=-1, le=2**63 - 1)]
"""An address, a stream or a moment; -1 for a missing address."""
_LONGEST_CONF = 2**12
"""Arbitrary: longer settings are not read."""

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
    line: Number = 0
    name: str = ""


class SnapshotBlock(Struct):
    """A block of a segment, in use if its state begins with `active`. `frames` are read by `frames_of`."""

    size: Bytes
    state: str
    address: Number = -1
    requested_size: Bytes = 0
    frames: Any = None

    @property
    def active(self) -> bool:
        """True if it cannot be given away."""
        return self.state.startswith("active")


class SnapshotSegment(Struct):
    """Memory that the allocator holds from the device."""

    address: Number
    total_size: Bytes
    device: int = 0
    stream: Number = 0
    segment_type: str = "large"
    segment_pool_id: tuple[int, int] = (0, 0)
    is_expandable: bool = False
    blocks: list[SnapshotBlock] = []


class SnapshotEvent(Struct):
    """An event of the allocator. `device_free`, of an `oom` only: bytes that the device had left."""

    action: str
    addr: Number = 0
    size: Bytes = 0
    stream: Number = 0
    time_us: Number = 0
    device_free: Bytes | None = None
    frames: Any = None


class Snapshot(Struct):
    """All segments at the moment of writing, and the last events of each device, oldest first."""

    segments: list[SnapshotSegment]
    device_traces: list[list[SnapshotEvent]] = []
    allocator_settings: dict[str, Any] = {}

    @property
    def conf(self) -> str:
        """The value of `PYTORCH_CUDA_ALLOC_CONF` of the process, empty if it is not known."""
        conf = self.allocator_settings.get("PYTORCH_CUDA_ALLOC_CONF")
        return conf if isinstance(conf, str) and len(conf) <= _LONGEST_CONF else ""


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
