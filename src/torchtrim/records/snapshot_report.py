"""The report of `torchtrim snapshot`. Sizes are bytes."""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

Kind = Literal["held before", "forward", "backward", "optimizer", "other"]


class SnapshotHolder(Struct, frozen=True, kw_only=True):
    """Blocks live at the peak that one place of the program allocated.

    `path`, `line`, `function`: the innermost call in the user's source, empty where no stack was recorded.
    `within`: the calls around it, outermost first. `by`: the function of a library that allocated.
    """

    kind: Kind
    path: str = ""
    line: int = 0
    function: str = ""
    within: tuple[str, ...] = ()
    by: str = ""
    bytes: int = 0
    count: int = 0


class Slack(Struct, frozen=True, kw_only=True):
    """The bytes reserved beyond the requested ones, at the peak of reserved memory.

    `rounding`: of sizes. `split`: free parts of segments that are partly in use, `pieces` in number.
    `cached`: segments that are entirely free.
    """

    rounding: int
    split: int
    pieces: int
    cached: int


class SettingTried(Struct, frozen=True, kw_only=True):
    """A replay of the requests from an empty cache. `conf`: for `PYTORCH_CUDA_ALLOC_CONF`, empty for none.

    `retries`: how often it had to release its cache. `full`: whether a request did not fit the device.
    """

    conf: str
    peak_reserved: int
    retries: int
    device_calls: int
    full: bool


class OutOfMemory(Struct, frozen=True, kw_only=True):
    """A request that failed. `cached`: free bytes that the allocator held; `largest`: their largest piece.

    `met_by`: the tried settings that find room in a replay.
    """

    event: int
    size: int
    device_free: int
    allocated: int
    reserved: int
    cached: int
    largest: int
    pieces: int
    place: str
    met_by: tuple[str, ...] = ()


class Evidence(Struct, frozen=True, kw_only=True):
    """The replay under the recorded settings beside the record."""

    allocations: int
    same: int
    device_calls: int
    recorded_device_calls: int
    peak_reserved: int
    recorded_peak_reserved: int

    @property
    def exact(self) -> bool:
        """True if reserved bytes and calls of the device are as recorded."""
        return (self.device_calls, self.peak_reserved) == (
            self.recorded_device_calls,
            self.recorded_peak_reserved,
        )


class Curve(Struct, frozen=True, kw_only=True):
    """Memory over the events, in columns: the most bytes of each. `kinds` stack up to `allocated`."""

    allocated: tuple[int, ...]
    reserved: tuple[int, ...]
    kinds: dict[str, tuple[int, ...]]


class DeviceSnapshot(Struct, frozen=True, kw_only=True):
    """One device of a snapshot. `arena`: the height of one packed arena that holds all requests, if tried."""

    device: int
    events: int
    conf: str
    peak_allocated: int
    peak_event: int
    peak_reserved: int
    reserved_at_start: int
    slack: Slack
    evidence: Evidence
    holders: tuple[SnapshotHolder, ...]
    tried: tuple[SettingTried, ...]
    ooms: tuple[OutOfMemory, ...]
    curve: Curve
    arena: int | None = None

    @property
    def base(self) -> SettingTried:
        """The replay from an empty cache under the recorded settings."""
        return self.tried[0]

    @property
    def best(self) -> SettingTried | None:
        """The setting that holds least, if it holds noticeably less than the recorded ones."""
        fitting = [each for each in self.tried[1:] if not each.full]
        best = min(fitting, key=lambda each: each.peak_reserved, default=None)
        if best is None or best.peak_reserved > (1 - NOTICEABLE) * self.base.peak_reserved:
            return None
        return best


class SnapshotReport(Struct, frozen=True, kw_only=True):
    """The findings of a memory snapshot. `notes`: what was not found in it."""

    file: str
    devices: tuple[DeviceSnapshot, ...]
    notes: tuple[str, ...] = ()


NOTICEABLE = 0.01
"""A setting that saves less than this share is not worth a change; small differences depend on the order."""
