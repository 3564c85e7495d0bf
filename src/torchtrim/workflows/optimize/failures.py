"""A planned step that fails: which places of the plan made it fail, and how to plan without them."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection

from msgspec.structs import replace

from torchtrim.core.isolation import Failure, debugging, note
from torchtrim.core.units import format_bytes
from torchtrim.errors import InfeasibleBudget, PlannedStepFailed
from torchtrim.executor.failing import defective
from torchtrim.records.plan import Plan
from torchtrim.records.profile import Profile
from torchtrim.records.trial import Trial

_REFUSED = "ApplyFailed: "
_RANGE = re.compile(r"(?P<path>.+)\[(?P<first>\d+):(?P<last>\d+)\]")
NOTHING = "nothing that is allowed lowers the peak, so the plan changes nothing"


def broken_in(error: Exception) -> str:
    """The technique with a defect that kept a plan from being applied; empty for other failures."""
    return defective(getattr(error, "place", ""))


def broken_technique(error: Exception) -> set[str]:
    """The technique that could not be applied by a defect of its own, which is noted; else none.

    With TORCHTRIM_DEBUG=1 the error is raised.
    """
    name = broken_in(error)
    if name and debugging():
        raise error
    if name:
        first = str(error).splitlines()[0].rstrip(".")
        note(Failure("technique", name, first.rpartition(f"{name} raised ")[2]))
    return {name} if name else set()


def failing_places(error: PlannedStepFailed, plan: Plan, run: Callable[[Plan], Trial]) -> set[str]:
    """The places to drop: the one that the error names, else the half of the plan that fails alone."""
    places = [where for one in plan.techniques for where in one.where]
    if error.place in places:
        return {error.place}
    if len(places) == 1:
        return set(places)
    half = places[: (len(places) + 1) // 2]
    try:
        run(_only(plan, half))
    except PlannedStepFailed as again:
        return {again.place} if again.place in half else set(half)
    return set(places[len(half) :])


def of_techniques(
    error: PlannedStepFailed,
    places: Collection[str],
    plan: Plan,
    profile: Profile | None,
    *,
    last: bool,
) -> set[str]:
    """The places; those of optimizers, and those that a technique refuses, with the technique, since another
    may do there. `last`: with all that the techniques there do anywhere, since no more rounds are left."""
    optimizers = (
        {one.optimizer for one in profile.optimizer_steps} if profile is not None else set()
    )
    own = {p for p in places if p in optimizers or _REFUSED in str(error)}
    named = {f"{t.name}:{w}" for t in plan.techniques for w in t.where if w in own}
    techniques = {t.name for t in plan.techniques if not set(t.where).isdisjoint(places)}
    return (set(places) - own) | named | (techniques if last else set())


def failure_note(error: PlannedStepFailed, dropped: Collection[str]) -> str:
    """The note about it."""
    return (
        f"a planned step failed, which the original does not, and was planned again without "
        f"{', '.join(sorted(dropped))}: {str(error).splitlines()[0]}"
    )


def without_places(profile: Profile, places: Collection[str]) -> Profile:
    """The profile in which nothing can be planned at these places, nor at what is around them."""
    if not places:
        return profile
    barred = {number for place in places for number in _modules_at(profile, place)}
    modules = [
        replace(module, hooked=True) if number in barred else module
        for number, module in enumerate(profile.modules)
    ]
    return replace(profile, modules=modules)


def _only(plan: Plan, places: Collection[str]) -> Plan:
    parts = (
        replace(one, where=tuple(where for where in one.where if where in places))
        for one in plan.techniques
    )
    return replace(plan, techniques=tuple(part for part in parts if part.where))


def _modules_at(profile: Profile, place: str) -> list[int]:
    """The module of that path, or the children of a range of a chain."""
    numbers = {module.path: number for number, module in enumerate(profile.modules)}
    match = _RANGE.fullmatch(place)
    if match is None:
        return [numbers[place]] if place in numbers else []
    chain = numbers.get(match["path"], -1)
    children = [n for n, module in enumerate(profile.modules) if module.parent == chain >= 0]
    return children[int(match["first"]) : int(match["last"])]


def nothing_helps(budget: int, whole: int, set_by: str) -> InfeasibleBudget:
    """Return the error of a budget for which no plan saves anything."""
    return InfeasibleBudget(
        f"{NOTHING}: the peak stays at {format_bytes(whole)} ({whole} bytes), set by {set_by}, and "
        f"{format_bytes(budget)} are wanted. Make the batch smaller, or look at what the peak is made of.",
        smallest_bytes=whole,
        set_by=set_by,
    )
