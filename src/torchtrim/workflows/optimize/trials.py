"""Plans to run for a budget: their measured figures, and the other plans to try.

Predicted times are sums of single operators' times, so a plan may be quicker than another with the same
prediction. Before a budget is refused, plans without techniques that saved less than predicted are tried,
and each technique alone.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from typing import NamedTuple

from msgspec.structs import replace

from torchtrim.core.isolation import Failure, debugging, note
from torchtrim.core.units import format_apart, format_bytes, format_seconds
from torchtrim.core.words import first_line
from torchtrim.errors import (
    ApplyFailed,
    InfeasibleBudget,
    PlannedStepFailed,
    ScriptFailed,
    Unsupported,
    UsageError,
)
from torchtrim.executor.failing import defective
from torchtrim.executor.overheads import overheads
from torchtrim.executor.registry import (
    MeasuredTechnique,
    Option,
    names,
    options_of,
    technique,
    units,
)
from torchtrim.planner.pins import EVERYWHERE, KEEP, NEVER, Patterns, compile_pattern, never_of
from torchtrim.planner.planner import Planner
from torchtrim.planner.plans import techniques_of
from torchtrim.planner.variants import Planners
from torchtrim.records.budget import Budget, MemoryKind
from torchtrim.records.certificate import Certificate
from torchtrim.records.finding import Equivalence
from torchtrim.records.plan import Plan, Technique
from torchtrim.records.profile import Profile
from torchtrim.records.terms import Allowance, words_for
from torchtrim.records.trial import Trial
from torchtrim.step.from_profile import step_of

_WORTH = 0.97  # of the first plan's time: undisturbed runs of one step differ by less
_TIGHTER = (0.97, 0.93, 0.88)  # of the budget: arbitrary, near enough to cost little more time
_ALONE = ("recompute", "replay")
_WELL_USED = 0.9  # of the budget: planning again for the rest saves little time
_NEAR = 0.02  # of the budget: a smaller error of the prediction leaves the plan nearly the same
_HELD = 0.01  # of the prediction: the allocator's rounding is smaller


class MeasuredPlan(NamedTuple):
    """A plan that was run, and its figure of the budget's kind of memory. No plan for the original."""

    plan: Plan | None
    trial: Trial | None
    used: int


def measured(trial: Trial, kind: MemoryKind) -> int:
    """Return the trial's figure of a kind of memory. Raises `Unsupported` if it was not measured."""
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


def known_so_far(original: Trial | None, tried: Collection[MeasuredPlan]) -> Iterator[str]:
    """Yield what is known when the work is interrupted: the original's figures, and the best plan's."""
    if original is None:
        return
    known = (original.peak_bytes, original.seconds)
    yield f"known so far: the original peaks at {_figures(*known)}"
    if tried:
        best = min(tried, key=lambda one: one.used)
        assert best.plan is not None
        assert best.trial is not None
        names = " and ".join(dict.fromkeys(one.name for one in best.plan.techniques))
        yield f"best plan so far: {names}, {_figures(best.used, best.trial.seconds)}"


def _figures(peak: int, seconds: float) -> str:
    return f"{format_bytes(peak)}, {format_seconds(seconds)} a step"


class TimedPlan(NamedTuple):
    """Plan with its trial within the budget."""

    plan: Plan
    trial: Trial


def others(
    planner_of: Callable[[str], Planner | Planners],
    apart: Sequence[Plan],
    budget: Budget,
    most: int,
) -> list[Plan]:
    """Return up to `most` further plans, in the order of their predicted times.

    `planner_of` returns the planner of one technique alone, or of all for the empty name.
    """
    found: list[Plan] = []
    for plan in _planned(planner_of, budget):
        if all(plan.techniques != one.techniques for one in (*apart, *found)):
            found.append(plan)
    return sorted(found, key=lambda plan: plan.predicted.step_seconds)[:most]


def _planned(planner_of: Callable[[str], Planner | Planners], budget: Budget) -> Iterator[Plan]:
    """Yield plans, also for tighter budgets: more recomputation may take less time."""
    tries = [("", int(share * budget.bytes)) for share in _TIGHTER]
    for name, most in (*tries, *((alone, budget.bytes) for alone in _ALONE)):
        try:
            yield planner_of(name).plan(budget._replace(bytes=most))
        except InfeasibleBudget:
            continue


def quickest(
    first: TimedPlan, plans: Iterable[Plan], run: Callable[[Plan], Trial | None]
) -> tuple[TimedPlan, str]:
    """Return the quickest of the first and the others that `run` within the budget, and a note."""
    best, seconds = first, [first.trial.seconds]
    for plan in plans:
        trial = None
        with suppress(PlannedStepFailed):
            trial = run(plan)
        if trial is None:
            continue
        seconds.append(trial.seconds)
        if trial.seconds < _WORTH * first.trial.seconds and trial.seconds < best.trial.seconds:
            best = TimedPlan(plan, trial)
    if len(seconds) == 1:
        return best, "no other plan for the budget ran"
    number = seconds.index(best.trial.seconds) + 1
    times = ", ".join(f"{1e3 * one:.1f}" for one in seconds)
    return best, f"{len(seconds)} plans were run, at {times} ms a step; number {number} was chosen"


class PlanOutcome(NamedTuple):
    """A plan that was run: its measured figure, and the simulation's prediction."""

    plan: Plan
    used: int
    simulated: int


def suspects(outcomes: Iterable[PlanOutcome]) -> list[frozenset[str]]:
    """Return the techniques to plan without: each one of plans that needed more than predicted, then all.

    The techniques of a plan that met its prediction are not among them.
    """
    held, missed = set[str](), set[str]()
    for one in outcomes:
        holds = one.used <= (1 + _HELD) * one.simulated
        (held if holds else missed).update(unit.name for unit in one.plan.techniques)
    blamed = sorted(missed - held)
    alone = [frozenset((name,)) for name in blamed]
    return [*alone, frozenset(blamed)] if len(blamed) > 1 else alone


def plans_below(
    planners: Iterable[Planner | Planners], budget: Budget, allowed: Allowance
) -> list[Plan]:
    """Return each planner's plan for the budget, or with its smallest peak, if allowed.

    Plans that fit come first, then plans by their peaks.
    """
    plans = (_plan_of(planner, budget) for planner in planners)
    permitted = [
        plan
        for plan in plans
        if plan.techniques
        and all(allowed.holds(unit.equivalence, unit.name) for unit in plan.techniques)
    ]
    return sorted(permitted, key=lambda plan: max(plan.predicted.peak_bytes, budget.bytes))


def _plan_of(planner: Planner | Planners, budget: Budget) -> Plan:
    try:
        return planner.plan(budget)
    except InfeasibleBudget:
        return planner.floor_plan(budget)


def well_used(used: int, error: int, budget: int) -> bool:
    """Return True for a plan that leaves little of the budget. `error`: measured minus predicted bytes."""
    return used <= budget and (used >= _WELL_USED * budget or error > -_NEAR * budget)


Choice = tuple[Technique, ...]


class Recorded(NamedTuple):
    """Techniques, and the trial of the original with them alone."""

    techniques: Choice
    trial: Trial

    @property
    def barred(self) -> set[str]:
        """The techniques that cannot be in a plan with these."""
        return {name for one in self.techniques for name in _unit_of(one.name).bars(one)}


def _unit_of(name: str) -> MeasuredTechnique:
    unit = technique(name)
    assert isinstance(unit, MeasuredTechnique)
    return unit


def helped_by(name: str) -> tuple[str, ...]:
    """Return the techniques that a technique makes possible."""
    unit = technique(name)
    return unit.helps if isinstance(unit, MeasuredTechnique) else ()


def semantic_names() -> list[str]:
    """Return the techniques that change the function."""
    return [name for name, unit in units().items() if unit.equivalence == "SEMANTIC"]


def measured_names() -> list[str]:
    """Return the techniques whose saving is measured; any that keep the function are tried last."""
    return [name for name, unit in units().items() if isinstance(unit, MeasuredTechnique)]


def check_named(allowed: Allowance) -> None:
    """Raise `UsageError` for the name of an unknown technique, or one that keeps the function."""
    known = semantic_names()
    for name in sorted((allowed.named or frozenset()) - {*known}):
        what = "keeps the function" if name in names() else "is not a technique"
        raise UsageError(
            f"--allow semantic={name}: {name} {what}. These change the function: "
            f"{', '.join(known)}."
        )


def split_pins(pins: Patterns) -> tuple[Patterns, Patterns]:
    """Split pins into those of simulated and those of measured techniques."""
    known = {*measured_names()}
    simulated = {what: texts for what, texts in pins.items() if what not in known}
    if NEVER in pins:
        simulated[NEVER] = [one for one in pins[NEVER] if never_of(one)[0] not in known]
    return simulated, {what: texts for what, texts in pins.items() if what in known}


def pins_for(only: str, pins: Patterns) -> Patterns:
    """Return the pins that apply to plans of one technique alone, or to all plans for the empty name."""
    if not only:
        return pins
    found = {what: texts for what, texts in pins.items() if what in (only, KEEP)}
    never = [text for text in pins.get(NEVER, ()) if never_of(text)[0] == only]
    return {**found, NEVER: never} if never else found


def barred(original: Trial, pins: Patterns) -> set[str]:
    """Return the places, as `TECHNIQUE:PLACE`, where pins forbid techniques whose saving is measured."""
    found = set[str]()
    for text in pins.get(NEVER, ()):
        name, where = never_of(text)
        if name in measured_names():
            pattern = compile_pattern(where)
            places = [option.where for option in _options(original, name)]
            found |= {
                f"{name}:{one}" for one in places if where == EVERYWHERE or pattern.fullmatch(one)
            }
    return found


def pinned_choice(original: Trial, pins: Patterns, allowed: Allowance) -> Choice:
    """Return the techniques of pins. Raises `UsageError` for a pin without a match, or not allowed."""
    found: list[Option] = []
    for name, texts in pins.items():
        _check_allowed(technique(name).equivalence, name, allowed)
        offered = _options(original, name)
        for text in texts:
            named = [one for one in offered if compile_pattern(text).fullmatch(one.where)]
            if not named:
                places = ", ".join(dict.fromkeys(one.where for one in offered))
                raise UsageError(
                    f"{name} = [{text!r}] under [pins] matches nothing. It can be pinned at: "
                    f"{places or 'nowhere in this step'}."
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
    """Return the allowed ways of each technique to try without a pin."""
    found: list[Choice] = []
    for name in names:
        options = [
            one
            for one in _options(original, name)
            if {one.technique, one.where, f"{one.technique}:{one.where}"}.isdisjoint(dropped)
        ]
        ways = techniques_of(options)[: _unit_of(name).ways]
        found += [(one,) for one in ways if allowed.holds(one.equivalence, name)]
    return found


def recorded(
    original: Trial,
    wanted: Collection[Choice],
    run: Callable[[Choice], Trial],
    failed: Callable[[str], None],
) -> Iterator[Recorded]:
    """Yield the trial of each choice, and of the best choices of all techniques together.

    `failed` is called with a note on each choice that fails.
    """
    lowest: dict[str, Recorded] = {}
    for choice in wanted:
        trial = _recorded(choice, run, failed)
        if trial is None:
            continue
        yield trial
        if len(choice) == 1:
            known = lowest.get(choice[0].name)
            if known is None or trial.trial.peak_bytes < known.trial.peak_bytes:
                lowest[choice[0].name] = trial
    saving = [one for one in lowest.values() if one.trial.peak_bytes < original.peak_bytes]
    together = tuple(part for one in saving for part in one.techniques)
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
        failed(f"{said} cannot be used here: {first_line(error)}")
        return None
    return Recorded(choice, trial) if trial.profile is not None else None


def _options(original: Trial, name: str) -> list[Option]:
    assert original.profile is not None
    return options_of(name, step_of(original.profile, original.seconds))


_REFUSED = "ApplyFailed: "
_RANGE = re.compile(r"(?P<path>.+)\[(?P<first>\d+):(?P<last>\d+)\]")
NOTHING = "no allowed technique lowers the peak, so the plan changes nothing"


def broken_in(error: Exception) -> str:
    """Return the technique with a defect that kept a plan from being applied; empty for other failures."""
    return defective(getattr(error, "place", ""))


def broken_technique(error: Exception) -> set[str]:
    """Return the technique that failed by its own defect, and note the defect; empty otherwise.

    With TORCHTRIM_DEBUG=1 raise the error.
    """
    name = broken_in(error)
    if name and debugging():
        raise error
    if name:
        first = first_line(error).rstrip(".")
        note(Failure("technique", name, first.rpartition(f"{name} raised ")[2]))
    return {name} if name else set()


def failing_places(error: PlannedStepFailed, plan: Plan, run: Callable[[Plan], Trial]) -> set[str]:
    """Return the places to drop: the error's own place, or the half of the plan that fails alone."""
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
    """Qualify the places of optimizers and of refusals with the technique, since another may succeed there.

    `last`: add the whole techniques, since no more rounds are left.
    """
    optimizers = (
        {one.optimizer for one in profile.optimizer_steps} if profile is not None else set()
    )
    own = {p for p in places if p in optimizers or _REFUSED in str(error)}
    named = {f"{t.name}:{w}" for t in plan.techniques for w in t.where if w in own}
    techniques = {t.name for t in plan.techniques if not set(t.where).isdisjoint(places)}
    return (set(places) - own) | named | (techniques if last else set())


def without_places(profile: Profile, places: Collection[str]) -> Profile:
    """Return the profile without plannable modules at these places or around them."""
    if not places:
        return profile
    barred = {number for place in places for number in _modules_at(profile, place)}
    modules = [
        replace(module, hooked=True, hooked_with_all=False) if number in barred else module
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
    numbers = {module.path: number for number, module in enumerate(profile.modules)}
    match = _RANGE.fullmatch(place)
    if match is None:
        return [numbers[place]] if place in numbers else []
    chain = numbers.get(match["path"], -1)
    children = [n for n, module in enumerate(profile.modules) if module.parent == chain >= 0]
    return children[int(match["first"]) : int(match["last"])]


def nothing_helps(budget: int, whole: int, set_by: str) -> InfeasibleBudget:
    """Return the error for a budget that no plan comes closer to."""
    peak, asked = format_apart(whole, budget)
    return InfeasibleBudget(
        f"{NOTHING}: the peak stays at {peak} ({whole} bytes), set by {set_by}, and the "
        f"budget is {asked}. Make the batch smaller, or look at the tensors at the peak.",
        smallest_bytes=whole,
        set_by=set_by,
    )


def check_equal(certificate: Certificate | None, what: str, advice: str = "") -> None:
    """Raise `ApplyFailed` if the planned step or call does not equal the original."""
    if certificate is not None and certificate.verdict == "NOT EQUAL":
        raise ApplyFailed(
            f"the planned {what} does not equal the original: {certificate.reason}. "
            f"The model is unchanged.{advice}"
        )


def with_overheads(trial: Trial) -> Trial:
    """Add this machine's overheads of recomputation to a profile of the CPU."""
    if trial.profile is None or not trial.profile.device.startswith("cpu"):
        return trial
    return replace(trial, profile=replace(trial.profile, overheads=overheads()))
