"""Figures of a step: per run, per rank, per technique, and the parts of its peak."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta, Struct

from torchtrim.records.finding import Equivalence

Bytes = Annotated[int, Meta(ge=0)]


class Figures(Struct, frozen=True, kw_only=True):
    """Measured figures. `step_seconds` is the median of the timed steps, `spread_seconds` their range."""

    peak_bytes: Bytes
    tracked_peak_bytes: Bytes
    reserved_bytes: Bytes | None
    rss_bytes: Bytes | None
    step_seconds: float
    spread_seconds: float
    by_kind: dict[str, Bytes]


class Lever(Struct, frozen=True, kw_only=True):
    """The smallest peak that one technique reaches, or several together, joined by ` + `.

    `needs`: the option required to use it, or empty. `source`: "measured" if the step was run this way,
    "simulated" if computed from its profile.
    """

    technique: str
    equivalence: Equivalence
    peak_bytes: Bytes
    step_seconds: float
    needs: str = ""
    source: Literal["measured", "simulated"]


class PeakPart(Struct, frozen=True, kw_only=True):
    """A part of a peak, described in words."""

    what: str
    bytes: Bytes


class RankFigures(Struct, frozen=True, kw_only=True):
    """Figures of one rank in the recorded step.

    `exchanged_bytes` is the input of its `collectives`, which took `exchange_seconds` in total. The rank was
    blocked by them for `blocked_seconds`, including `waited_seconds` of waiting for a later rank.
    """

    rank: int
    original: Figures | None
    planned: Figures | None = None
    collectives: int = 0
    exchanged_bytes: Bytes = 0
    exchange_seconds: float = 0.0
    blocked_seconds: float = 0.0
    waited_seconds: float = 0.0


class ExchangePart(Struct, frozen=True, kw_only=True):
    """One rank's part in a collective; times count from the start of the first rank's step."""

    rank: int
    start: float
    seconds: float
    blocked_seconds: float


class ExchangeRow(Struct, frozen=True, kw_only=True):
    """A collective of the recorded step. `bytes` counts one rank's input."""

    name: str
    group: str
    bytes: Bytes
    ranks: tuple[ExchangePart, ...]
