"""The step with techniques applied of which it is measured, not computed, what they save: recorded."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from typing import NamedTuple

from torchtrim.errors import ApplyFailed, PlannedStepFailed, ScriptFailed, UsageError
from torchtrim.executor.registry import Measured, Option, names, options_of, technique, units
from torchtrim.planner.pins import Patterns, compiled
from torchtrim.planner.plans import techniques_of
from torchtrim.records.allowance import Allowance, words_for
from torchtrim.records.finding import Equivalence
from torchtrim.records.plan import Technique
from torchtrim.records.trial import Trial
from torchtrim.step.from_profile import step_of
from torchtrim.workflows.optimize.failures import broken_technique

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
            named = [one for one in offered if compiled(text).fullmatch(one.where)]
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
