"""A plan: the techniques chosen for a budget. A file that a person reads, edits and commits."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta, Struct

from torchtrim.records.finding import Equivalence

Text = Annotated[str, Meta(max_length=4096)]
Bytes = Annotated[int, Meta(ge=0, le=2**62)]
MemoryKind = Literal["allocated", "reserved", "rss"]


class Technique(Struct, frozen=True, kw_only=True):
    """One technique at some places. `where` are module paths, the root's name first."""

    name: Text
    where: tuple[Text, ...]
    options: dict[Text, Text | int | float | bool] = {}
    equivalence: Equivalence = "BITWISE"


class Prediction(Struct, frozen=True, kw_only=True):
    """What the planner expects of a planned step."""

    peak_bytes: Bytes
    step_seconds: Annotated[float, Meta(ge=0)]


class Plan(Struct, frozen=True, kw_only=True):
    """What to do to which model for which budget.

    `fingerprint` holds a hash of each root's paths, types and shapes; `script_sha256` is the
    script's. What is left out is not checked.
    """

    schema_version: Literal[1] = 1
    torchtrim: Text
    script: Text
    script_sha256: Text = ""
    fingerprint: dict[Text, Text]
    budget_bytes: Bytes
    memory_kind: MemoryKind = "allocated"
    techniques: tuple[Technique, ...]
    predicted: Prediction
