"""Other budgets in words: what their plans use, and whose milliseconds their steps are."""

from __future__ import annotations

from collections.abc import Sequence

from torchtrim.records.report import FrontierPoint


def frontier_shown(points: Sequence[FrontierPoint], most: int) -> Sequence[FrontierPoint]:
    """Return the rows within `most` plans, evenly over the budgets, and all manual plans, in their order."""
    plans = [number for number, one in enumerate(points) if not one.by_hand]
    if len(plans) > most:
        last = len(plans) - 1
        plans = [plans[last * row // max(most - 1, 1)] for row in range(most)]
    return [one for number, one in enumerate(points) if one.by_hand or number in plans]


def on_device(points: Sequence[FrontierPoint]) -> str:
    """Return `" on A100, modelled"` for steps of another device than this one, else an empty string."""
    device = next((one.device for one in points if one.device), "")
    return f" on {device.upper()}, modelled" if device else ""


def way_of(point: FrontierPoint) -> str:
    """Return each technique of a point's plan with the number of its places: `"overwrite x7, replay x2"`."""
    ways = (f"{name} x{places}" for name, places in point.techniques.items())
    return point.by_hand or ", ".join(ways) or "unchanged"
