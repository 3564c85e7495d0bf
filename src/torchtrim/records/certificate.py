"""A certificate: measured evidence that the planned workload equals the original."""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

Verdict = Literal["BITWISE", "ROUNDING", "AS ASKED", "NOT EQUAL", "UNDECIDED"]


class Difference(Struct, frozen=True, kw_only=True):
    """The first thing that differs. `op` names the quantity, such as `gradient` or `output`.

    `operator` is the first operator of that step that gave something else, with `path` and `line` of it and
    `inside`, the module that ran it; `other_operator`, `other_path` and `other_line` are those of the other
    run. They are empty where no operator differs, as where a step writes a list of Python's.
    """

    module: str
    op: str
    path: str = ""
    line: int = 0
    operator: str = ""
    inside: str = ""
    other_operator: str = ""
    other_path: str = ""
    other_line: int = 0


class Coverage(Struct, frozen=True, kw_only=True):
    """What a verdict was shown for, of the original; nothing is claimed for what is not in it.

    `inputs`: those of calls from outside, as `"Net: float32[8, 3, 32, 32]"`. `batch_sizes`: the first
    dimension of a call's first input. `modes`: of the roots while they ran. `dimensions`: how many
    dimensions inputs have. `processes`: ranks of a job that runs in several.
    """

    inputs: tuple[str, ...] = ()
    dtypes: tuple[str, ...] = ()
    batch_sizes: tuple[int, ...] = ()
    dimensions: tuple[int, ...] = ()
    modes: tuple[Literal["training", "evaluation"], ...] = ()
    steps: int = 0
    device: str = ""
    processes: tuple[int, ...] = (0,)


class Asked(Struct, frozen=True, kw_only=True):
    """What a plan replaces because it was asked to, and what that does to the loss.

    `techniques`: the SEMANTIC ones. `others`: how equal all else is to the original with that replacement
    made by hand. `losses` and `original_losses`: of each compared step, None where one is not finite.
    `largest_difference`: of the losses, relative to the original's largest; None where there are none.
    """

    techniques: tuple[str, ...]
    others: Literal["BITWISE", "ROUNDING"]
    losses: tuple[float | None, ...]
    original_losses: tuple[float | None, ...]
    largest_difference: float | None


class Certificate(Struct, frozen=True, kw_only=True):
    """A verdict with its figures.

    `compared` counts it, such as `"24 gradients x 3 steps"`. `largest_difference` is
    relative to the largest magnitude of the quantity that differs most; None where it was not measured, 0
    where all bits agree. `noise` is the same figure for the original against itself, 0 where all bits
    agree. `seeds` says who seeded the random numbers. `reason` is the verdict in a sentence. `coverage`:
    the shapes, types, modes and steps that it was shown for; None in a certificate that is older than the
    field. `asked`: of a verdict AS ASKED the replacement; the figures are then against the original with
    that made by hand.
    """

    verdict: Verdict
    compared: tuple[str, ...]
    largest_difference: float | None
    first_difference: Difference | None
    noise: float | None
    seeds: Literal["script", "torchtrim"]
    steps: int
    reason: str = ""
    coverage: Coverage | None = None
    asked: Asked | None = None
