"""Several ranks of one job: what each measured, and what they exchanged, on one clock."""

from __future__ import annotations

from msgspec import Struct

from torchtrim.records.figures import Bytes, Figures


class RankFigures(Struct, frozen=True, kw_only=True):
    """One rank, in the recorded step.

    `exchanged_bytes` is what it gave to `collectives`, which were under way for `exchange_seconds` in all. It
    did nothing else for `blocked_seconds` of it, and for `waited_seconds` of these another rank had not come.
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
    """A collective as one rank had it: seconds from the start of the first rank's step."""

    rank: int
    start: float
    seconds: float
    blocked_seconds: float


class ExchangeRow(Struct, frozen=True, kw_only=True):
    """A collective of the recorded step. `bytes` are those of one rank."""

    name: str
    group: str
    bytes: Bytes
    ranks: tuple[ExchangePart, ...]
