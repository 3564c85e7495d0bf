"""Plans that are run for a budget: what they were measured to need, and which others to try.

Predicted times rest on what single operators took, so of plans that are predicted alike another may be
quicker than the first. Before a budget is refused, plans without techniques that saved less than predicted
are tried, and each technique alone.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import NamedTuple

from msgspec.structs import replace

from torchtrim.core.isolation import Failure, debugging, note
from torchtrim.core.units import format_bytes
from torchtrim.errors import (
    ApplyFailed,
    InfeasibleBudget,
    PlannedStepFailed,
    ScriptFailed,
    Unsupported,
    UsageError,
)
from torchtrim.executor.failing import defective
from torchtrim.executor.registry import Measured, Option, names, options_of, technique, units
from torchtrim.planner.pins import Patterns, compile_pattern
from torchtrim.planner.planner import Planner
from torchtrim.planner.plans import techniques_of
from torchtrim.planner.variants import Planners
from torchtrim.records.budget import Budget, MemoryKind
from torchtrim.records.finding import Equivalence
from torchtrim.records.plan import Plan, Technique
from torchtrim.records.profile import Profile
from torchtrim.records.terms import Allowance, words_for
from torchtrim.records.trial import Trial
from torchtrim.step.from_profile import step_of

WORTH = 0.97
"""Of the first plan's time: measured times of two runs of one step differ by less, when nothing disturbs."""
_TIGHTER = (0.97, 0.93, 0.88)
_ALONE = ("recompute", "replay")
_WELL_USED = 0.9
_HELD = 0.01
"""A plan that is measured within so much of its prediction says nothing against its techniques."""


class MeasuredPlan(NamedTuple):
    """A plan that was run, and what it used of the memory that the budget is on; None for the original."""

    plan: Plan | None
    trial: Trial | None
    used: int

    @classmethod
    def unchanged(cls, used: int) -> MeasuredPlan:
        """The original, which changes nothing."""
        return cls(None, None, used)


def key_of(plan: Plan, kind: MemoryKind) -> tuple[str, MemoryKind]:
    """What tells a plan that was run from others."""
    return repr(plan.techniques), kind


def measured(trial: Trial, kind: MemoryKind) -> int:
    """The trial's figure of that kind of memory. Raises `Unsupported` where it was not measured."""
    figure = {
        "allocated": trial.peak_bytes,
        "reserved": max((step.reserved_bytes or 0 for step in trial.steps), default=0),
        "rss": trial.rss_bytes or 0,
    }[kind]
    if not figure:
        raise Unsupported(
            f"--memory-kind {kind}: it is not measured on {trial.device}. "
            "`allocated` is measured everywhere, `reserved` on CUDA, `rss` on CPU."
        )
    return figure


class TimedPlan(NamedTuple):
    """A plan that was run within the budget."""

    plan: Plan
    trial: Trial


def others(
    planner_of: Callable[[str], Planner | Planners],
    apart: Sequence[Plan],
    budget: Budget,
    most: int,
) -> list[Plan]:
    """Up to `most` plans apart from these, those first that are predicted to be quickest.

    `planner_of` gives the planner of one technique alone, or of all for the empty name.
    """
    found: list[Plan] = []
    for plan in _planned(planner_of, budget):
        if all(plan.techniques != one.techniques for one in (*apart, *found)):
            found.append(plan)
    return sorted(found, key=lambda plan: plan.predicted.step_seconds)[:most]


def _planned(planner_of: Callable[[str], Planner | Planners], budget: Budget) -> Iterator[Plan]:
    """For tighter budgets too: more that is made again may take less time."""
    tries = [("", int(share * budget.bytes)) for share in _TIGHTER]
    for name, most in (*tries, *((alone, budget.bytes) for alone in _ALONE)):
        try:
            yield planner_of(name).plan(budget._replace(bytes=most))
        except InfeasibleBudget:
            continue


def quickest(
    first: TimedPlan, plans: Iterable[Plan], run: Callable[[Plan], Trial | None]
) -> tuple[TimedPlan, str]:
    """The quickest of the first and the others that `run` within the budget, and a note on them."""
    best, seconds = first, [first.trial.seconds]
    for plan in plans:
        trial = _survives(plan, run)
        if trial is None:
            continue
        seconds.append(trial.seconds)
        if trial.seconds < WORTH * first.trial.seconds and trial.seconds < best.trial.seconds:
            best = TimedPlan(plan, trial)
    if len(seconds) == 1:
        return best, "no other plan for the budget was found to run beside the first"
    taken = f"number {seconds.index(best.trial.seconds) + 1} is taken"
    times = ", ".join(f"{1e3 * one:.1f}" for one in seconds)
    return best, f"{len(seconds)} plans were run, at {times} ms a step: {taken}"


def _survives(plan: Plan, run: Callable[[Plan], Trial | None]) -> Trial | None:
    try:
        return run(plan)
    except PlannedStepFailed:
        return None


class PlanOutcome(NamedTuple):
    """A plan that was run: what it used, and what the simulation alone had predicted."""

    plan: Plan
    used: int
    simulated: int

    @property
    def held(self) -> bool:
        """Whether it needed no more than was predicted."""
        return self.used <= (1 + _HELD) * self.simulated


def suspects(outcomes: Iterable[PlanOutcome]) -> list[frozenset[str]]:
    """The techniques to plan without: each one of plans that needed more than predicted, then all of them.

    A technique of a plan that held is none.
    """
    held, missed = set[str](), set[str]()
    for one in outcomes:
        (held if one.held else missed).update(unit.name for unit in one.plan.techniques)
    blamed = sorted(missed - held)
    alone = [frozenset((name,)) for name in blamed]
    return [*alone, frozenset(blamed)] if len(blamed) > 1 else alone


def note_on(blamed: Iterable[frozenset[str]]) -> str:
    """What a person is told of them."""
    named = sorted(frozenset().union(*blamed))
    return f"{' and '.join(named)} saved less than predicted, so plans without were tried too"


def plans_below(
    planners: Iterable[Planner | Planners], budget: Budget, allowed: Allowance
) -> Iterator[Plan]:
    """Each planner's plan for the budget, or that with its smallest peak; none that is not allowed.

    Those that fit come first, then those with the smallest peaks.
    """
    plans = [_plan_of(planner, budget) for planner in planners]
    plans = [
        one
        for one in plans
        if one.techniques
        and all(allowed.holds(unit.equivalence, unit.name) for unit in one.techniques)
    ]
    yield from sorted(plans, key=lambda one: max(one.predicted.peak_bytes, budget.bytes))


def _plan_of(planner: Planner | Planners, budget: Budget) -> Plan:
    try:
        return planner.plan(budget)
    except InfeasibleBudget:
        return planner.floor_plan(budget)


def well_used(used: int, error: int, budget: int) -> bool:
    """Whether a plan that used so much, by an error beside its prediction, leaves little of the budget."""
    return used <= budget and (used >= _WELL_USED * budget or error > -0.02 * budget)


Choice = tuple[Technique, ...]


class Recorded(NamedTuple):
    """Techniques, and the trial of the original with them alone."""

    techniques: Choice
    trial: Trial

    @property
    def barred(self) -> set[str]:
        """The techniques that cannot be in a plan with these."""
        return {name for one in self.techniques for name in unit_of(one.name).bars(one)}


def unit_of(name: str) -> Measured:
    """The technique of that name that is measured."""
    unit = technique(name)
    assert isinstance(unit, Measured)
    return unit


def helped_by(name: str) -> tuple[str, ...]:
    """The techniques that one makes possible."""
    unit = technique(name)
    return unit.helps if isinstance(unit, Measured) else ()


def semantic_names() -> list[str]:
    """The techniques that make another function."""
    return [name for name, unit in units().items() if unit.equivalence == "SEMANTIC"]


def measured_names() -> list[str]:
    """All techniques that are measured; those that keep the function are tried where nothing else fits."""
    return [name for name, unit in units().items() if isinstance(unit, Measured)]


def check_named(allowed: Allowance) -> None:
    """Raises `UsageError` where a technique is named that does not exist, or makes no other function."""
    known = semantic_names()
    for name in sorted((allowed.named or frozenset()) - {*known}):
        what = "keeps the function" if name in names() else "is no technique"
        raise UsageError(
            f"--allow semantic={name}: {name} {what}. These make another function: {', '.join(known)}."
        )


def split_pins(pins: Patterns) -> tuple[Patterns, Patterns]:
    """The pins of techniques whose saving is computed, and of those of which it is measured."""
    known = {*measured_names()}
    return (
        {what: texts for what, texts in pins.items() if what not in known},
        {what: texts for what, texts in pins.items() if what in known},
    )


def pinned_choice(original: Trial, pins: Patterns, allowed: Allowance) -> Choice:
    """What the pins demand. Raises `UsageError` for one that matches nothing or is not allowed."""
    found: list[Option] = []
    for name, texts in pins.items():
        _check_allowed(technique(name).equivalence, name, allowed)
        offered = _options(original, name)
        for text in texts:
            named = [one for one in offered if compile_pattern(text).fullmatch(one.where)]
            if not named:
                can = (
                    ", ".join(dict.fromkeys(one.where for one in offered)) or "nowhere in this step"
                )
                raise UsageError(
                    f"{name} = [{text!r}] under [pins] matches nothing. It can be pinned at: {can}."
                )
            first = {one.where: one for one in reversed(named)}
            found += [one for one in named if first[one.where] is one and one not in found]
    chosen = techniques_of(found)
    for one in chosen:
        _check_allowed(one.equivalence, one.name, allowed)
    return chosen


def _check_allowed(equivalence: Equivalence, name: str, allowed: Allowance) -> None:
    if not allowed.holds(equivalence, name):
        does = "makes another function" if equivalence == "SEMANTIC" else "rounds here"
        raise UsageError(
            f"[pins] has {name}, which {does}: give {words_for(equivalence, name)} too."
        )


def choices(
    original: Trial, names: Collection[str], dropped: Collection[str], allowed: Allowance
) -> list[Choice]:
    """The ways of each technique that are allowed and tried by themselves: others are for a person to pin."""
    found: list[Choice] = []
    for name in names:
        options = [one for one in _options(original, name) if not _is_dropped(one, dropped)]
        ways = techniques_of(options)[: unit_of(name).ways]
        found += [(one,) for one in ways if allowed.holds(one.equivalence, name)]
    return found


def recorded(
    original: Trial,
    wanted: Collection[Choice],
    run: Callable[[Choice], Trial],
    failed: Callable[[str], None],
) -> Iterator[Recorded]:
    """The trials that are wanted, and those of the lowest of each technique together. `failed` hears of
    others."""
    lowest: dict[str, Recorded] = {}
    for choice in wanted:
        found = _recorded(choice, run, failed)
        if found is None:
            continue
        yield found
        if len(choice) == 1:
            known = lowest.get(choice[0].name)
            if known is None or found.trial.peak_bytes < known.trial.peak_bytes:
                lowest[choice[0].name] = found
    saving = [one for one in lowest.values() if one.trial.peak_bytes < original.peak_bytes]
    together = tuple(one for found in saving for one in found.techniques)
    barred = {name for one in saving for name in one.barred}
    if len(together) > 1 and barred.isdisjoint(one.name for one in together):
        several = _recorded(together, run, failed)
        if several is not None:
            yield several


def _recorded(
    choice: Choice, run: Callable[[Choice], Trial], failed: Callable[[str], None]
) -> Recorded | None:
    try:
        trial = run(choice)
    except (ApplyFailed, PlannedStepFailed, ScriptFailed) as error:
        broken_technique(error)
        said = " and ".join(one.name for one in choice)
        failed(f"{said} cannot be used here: {str(error).splitlines()[0]}")
        return None
    return Recorded(choice, trial) if trial.profile is not None else None


def _options(original: Trial, name: str) -> list[Option]:
    assert original.profile is not None
    return options_of(name, step_of(original.profile, original.seconds))


def _is_dropped(option: Option, dropped: Collection[str]) -> bool:
    names = {option.technique, option.where, f"{option.technique}:{option.where}"}
    return not names.isdisjoint(dropped)


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
