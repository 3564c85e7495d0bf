"""A certificate: measured evidence that the planned workload equals the original."""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

Verdict = Literal["BITWISE", "ROUNDING", "NOT EQUAL", "UNDECIDED"]


class Difference(Struct, frozen=True, kw_only=True):
    """The first thing that differs. `op` names the quantity, such as `gradient` or `output`."""

    module: str
    op: str
    path: str = ""
    line: int = 0


class Certificate(Struct, frozen=True, kw_only=True):
    """A verdict with its figures.

    `compared` counts what was compared, such as `"24 gradients x 3 steps"`. `largest_difference` is
    relative to the largest magnitude of the quantity that differs most; None where it was not
    measured, 0 where all bits agree. `noise` is the same figure for the original against itself,
    0 where all bits agree.
    `seeds` says who seeded the random numbers. `reason` is the verdict in a sentence.
    """

    verdict: Verdict
    compared: tuple[str, ...]
    largest_difference: float | None
    first_difference: Difference | None
    noise: float | None
    seeds: Literal["script", "torchtrim"]
    steps: int
    reason: str = ""
