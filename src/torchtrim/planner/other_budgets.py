"""The points of a frontier: how a plan for a budget is written down, and their order."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from torchtrim.analysis.prices import device_of
from torchtrim.executor.registry import Option
from torchtrim.records.profile import Profile, is_emulated
from torchtrim.records.report import FrontierPoint


def point_of(
    profile: Profile,
    options: Sequence[Option],
    *,
    budget_bytes: int,
    peak_bytes: int,
    seconds: float,
    by_hand: str = "",
) -> FrontierPoint:
    """Return the point of a choice of options; for an emulated device, `seconds` are that device's."""
    return FrontierPoint(
        budget_bytes=budget_bytes,
        peak_bytes=peak_bytes,
        step_seconds=seconds,
        where=tuple(option.where for option in options),
        by_hand=by_hand,
        device=device_of(profile).name if is_emulated(profile.device) else "",
        techniques=dict(Counter(option.technique for option in options).most_common()),
    )


def in_order(points: Iterable[FrontierPoint]) -> tuple[FrontierPoint, ...]:
    """Return the points by budget, the largest first, each plan once: at the smallest of its budgets."""
    ordered = sorted(points, key=lambda one: -one.budget_bytes)
    each = {(one.peak_bytes, frozenset(one.where), one.by_hand): one for one in ordered}
    return tuple(sorted(each.values(), key=lambda one: -one.budget_bytes))
