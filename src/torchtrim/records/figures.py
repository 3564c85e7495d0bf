"""What a step measures."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Struct

Bytes = Annotated[int, Meta(ge=0)]


class Figures(Struct, frozen=True, kw_only=True):
    """What a step measures. `step_seconds` is the median of the timed steps, `spread_seconds` their range."""

    peak_bytes: Bytes
    tracked_peak_bytes: Bytes
    reserved_bytes: Bytes | None
    rss_bytes: Bytes | None
    step_seconds: float
    spread_seconds: float
    by_kind: dict[str, Bytes]
