"""A finding: something wasteful, where, what it costs, and what would fix it."""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

Source = Literal["measured", "replayed", "modelled"]
Equivalence = Literal["BITWISE", "ROUNDING", "SEMANTIC"]
EQUIVALENCES: tuple[Equivalence, ...] = ("BITWISE", "ROUNDING", "SEMANTIC")
"""The closest first."""


class Suggestion(Struct, frozen=True, kw_only=True):
    """What to do. `code` carries a diff, `config` the line to write, `refused` why there is none."""

    kind: Literal["code", "config", "advice", "refused"]
    equivalence: Equivalence | None = None
    diff: str | None = None
    reason: str = ""


class Finding(Struct, frozen=True, kw_only=True):
    """One finding of a rule. A price is per step; None where it was not measured."""

    code: str
    path: str
    line: int
    end_line: int
    message: str
    count_per_step: int
    price_ms: float | None = None
    price_bytes: int | None = None
    source: Source = "measured"
    fix: Suggestion | None = None
