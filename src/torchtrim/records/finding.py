"""A finding: something wasteful, its place and price, and a fix or advice."""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

Source = Literal["measured", "replayed", "modelled"]
Equivalence = Literal["BITWISE", "ROUNDING", "SEMANTIC"]
EQUIVALENCES: tuple[Equivalence, ...] = ("BITWISE", "ROUNDING", "SEMANTIC")
"""From the strongest to the weakest."""


class Suggestion(Struct, frozen=True, kw_only=True):
    """What to do about a finding.

    Kind `code` has a diff, `config` the line to write, `refused` the reason for the missing fix.
    """

    kind: Literal["code", "config", "advice", "refused"]
    equivalence: Equivalence | None = None
    diff: str | None = None
    reason: str = ""


class Finding(Struct, frozen=True, kw_only=True):
    """One finding of a rule. Prices are per step, None if not measured."""

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
