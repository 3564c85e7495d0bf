"""What a peak is made of, and what each lever on it would reach."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta, Struct

from torchtrim.records.finding import Equivalence

Bytes = Annotated[int, Meta(ge=0)]


class Lever(Struct, frozen=True, kw_only=True):
    """The smallest peak that a technique reaches alone, or several together, joined by ` + `.

    `needs`: what has to be given for it to be used, empty for nothing. `source`: whether the step was run
    so, or computed from its profile.
    """

    technique: str
    equivalence: Equivalence
    peak_bytes: Bytes
    step_seconds: float
    needs: str = ""
    source: Literal["measured", "simulated"]


class Part(Struct, frozen=True, kw_only=True):
    """A part of a peak: what the bytes are, in words."""

    what: str
    bytes: Bytes
