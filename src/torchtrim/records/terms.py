"""What every plan that is made for a workload has to keep to."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple


class Terms(NamedTuple):
    """What a person allows, forbids and wants of a plan.

    `allow`: what a plan may change (`records.allowance`). `exclude`: techniques not to be used. `pins`: what
    holds in every plan (`planner.pins`). `exports`: only what can be exported is planned, and run exported.
    `candidates`: how many plans for a budget are run, of which the quickest is taken.
    """

    allow: str = "BITWISE"
    exclude: Collection[str] = ()
    pins: Mapping[str, Sequence[str]] = {}
    exports: bool = False
    candidates: int = 1


BITWISE = Terms()
"""Whatever leaves each bit as it is."""
