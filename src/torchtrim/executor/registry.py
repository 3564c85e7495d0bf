"""Interfaces of techniques, their handles, and the registry of techniques."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, runtime_checkable

from torchtrim.core.isolation import isolated
from torchtrim.core.words import did_you_mean
from torchtrim.errors import ApplyFailed, UsageError
from torchtrim.executor.failing import note
from torchtrim.records.finding import Equivalence
from torchtrim.records.plan import Technique
from torchtrim.step.edits import Edit
from torchtrim.step.step import Span, Step

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer

    Root = nn.Module | Optimizer
    """A module called at top level, or an optimizer. Plans name it."""


class Handle(Protocol):
    """An applied technique."""

    def revert(self) -> None:
        """Restore the model."""


class Undo(NamedTuple):
    """A handle that calls a function."""

    revert: Callable[[], None]


class Handles:
    """Several applied techniques or changed modules, reverted together."""

    def __init__(self) -> None:
        self._handles: list[Handle] = []

    def add(self, handle: Handle) -> None:
        """Add a handle."""
        self._handles.append(handle)

    def check_settled(self) -> None:
        """Raise `ApplyFailed` if a technique has updated parameters ahead of a `step` not called yet."""
        for handle in self._handles:
            if (check := getattr(handle, "check_settled", None)) is not None:
                check()

    def revert(self) -> None:
        """Revert all handles, last first."""
        while self._handles:
            self._handles.pop().revert()


def all_or_none(places: Iterable[str], change: Callable[[str], Handle]) -> Handle:
    """Change each place. If one fails, revert all and raise its error, annotated with the place, so that
    planning can exclude it."""
    handles, place = Handles(), ""
    try:
        for place in places:
            handles.add(change(place))
    except BaseException as error:
        if isinstance(error, ApplyFailed):
            note(error, place)
        handles.revert()
        raise
    return handles


_HOME = "torchtrim.techniques"
Settings = tuple[tuple[str, str | int | float | bool], ...]
Roots = Mapping[str, Any]
"""Modules called at top level and optimizers, by name."""


class Option(NamedTuple):
    """A place where a technique can save.

    `where` is the place as written in a plan. `spans`: the tasks of each forward call of the place.
    `cut`: path and bounds, for a range of a Sequential. `settings`: further settings of the plan.
    `equivalence`: this option's equivalence, if weaker than the technique's.
    """

    technique: str
    where: str
    spans: tuple[Span, ...] = ()
    cut: tuple[str, int, int] | None = None
    settings: Settings = ()
    equivalence: Equivalence | None = None


class TechniqueUnit(Protocol):
    """One technique: `options` and `edits` read a step, `apply` changes live modules or optimizers.

    `does` says what it does to a place, as an imperative.
    A technique that accepts options in a plan lists their names in `takes`, and one that
    checks each step of a planned run the conditions in `assumes`; those that nothing can check are in
    `unseen`. It may also have
    `to_files(step)`, which returns options with a memory-mapped file instead of host memory, each of which
    excludes the same option in host memory; `settled(step, technique)`, which adjusts its settings once all
    its places in a plan are known; `goes_around`, if it must be applied after all that set hooks on saved
    tensors; and `refusals(step)`, which returns a sentence for each place where it
    could save but is not used: why, and at what cost.
    """

    name: str
    does: str
    equivalence: Equivalence

    def options(self, step: Step) -> Sequence[Option]:
        """Return the places of this step where the technique can save."""

    def edits(self, step: Step, option: Option) -> Edit | None:
        """Return the option's edit of the step, or None if it saves nothing."""

    def apply(self, roots: Roots, technique: Technique) -> Handle:
        """Change the places in `technique.where`. Raises `ApplyFailed` and leaves the model unchanged."""


class Plain(NamedTuple):
    """A function that does the work of a technique, for export as plain PyTorch.

    `function` in `module` is called with the roots by name, the places, and the technique's options as
    keywords. It returns an object with `revert()`.
    """

    module: str
    function: str


@runtime_checkable
class Exportable(Protocol):
    """A technique that can be exported as plain PyTorch."""

    def export(self) -> Plain:
        """Return the function that replaces `apply` without torchtrim."""


@runtime_checkable
class MeasuredTechnique(TechniqueUnit, Protocol):
    """A technique whose saving is measured by a run, not simulated.

    Its `edits` are None: the planner gets a step recorded with the technique applied. `helps`: the techniques
    that it enables. `ways`: a plan may choose among the first `ways` settings; the others must be pinned.
    """

    helps: tuple[str, ...] = ()
    ways: int = 1

    def edits(self, step: Step, option: Option) -> None:
        """Return None: the saving is measured by a run."""
        return None

    def bars(self, technique: Technique) -> Collection[str]:
        """Return the techniques that cannot be combined with this one, by default none."""
        return ()


@runtime_checkable
class Replaces(MeasuredTechnique, Protocol):
    """A SEMANTIC technique, which changes the function that the step computes."""

    def by_hand(self, roots: Roots, technique: Technique) -> Handle:
        """Make the same replacement by hand-written code, as the certificate's reference."""

    def advice(self, technique: Technique) -> str:
        """Return what else the user must do or know, as a clause, or an empty string."""


def technique(name: str) -> TechniqueUnit:
    """Return the technique of that name. Raises `UsageError` if there is none."""
    known = names()
    if name not in known:
        raise UsageError(
            f"there is no technique {name!r} in this torchtrim.{did_you_mean(name, known)} It has "
            f"{', '.join(known)}. A plan made by a newer torchtrim needs that version."
        )
    return _unit(name)


def check_known(one: Technique) -> None:
    """Raise `UsageError` for an unknown technique or an unknown option of it."""
    takes: Collection[str] = getattr(technique(one.name), "takes", ())
    unknown = sorted(set(one.options) - set(takes))
    if unknown:
        has = f"it has {', '.join(takes)}" if takes else "it has none"
        raise UsageError(
            f"{one.name} has no option {unknown[0]!r}, which the plan passes; {has}. Correct or remove "
            "it, or plan again. A plan made by a newer torchtrim needs that version."
        )


def assumed_by(one: Technique) -> tuple[str, ...]:
    """Return the conditions that a technique checks in each step of a run."""
    unit: tuple[str, ...] = getattr(technique(one.name), "assumes", ())
    return (*one.assumes, *unit)


def unseen_by(one: Technique) -> tuple[str, ...]:
    """Return the conditions that a technique relies on and cannot check."""
    unseen: tuple[str, ...] = getattr(technique(one.name), "unseen", ())
    return unseen


def _unit(name: str) -> TechniqueUnit:
    home = importlib.import_module(f"{_HOME}.{name}")
    if hasattr(home, "__path__"):
        home = importlib.import_module(f"{home.__name__}.technique")
    unit: TechniqueUnit = home.TECHNIQUE
    return unit


def units(exclude: Collection[str] = ()) -> dict[str, TechniqueUnit]:
    """Return the techniques by name, without excluded ones and ones that cannot be imported."""
    found = {}
    for name in (name for name in names() if name not in exclude):
        with isolated("technique", name):
            found[name] = technique(name)
    return found


def _asked(name: str, method: str, *given: Any) -> Any:
    """Return what a technique's method returns, as a list if it is iterable; None if it fails or has none."""
    result = None
    with isolated("technique", name):
        ask = getattr(technique(name), method, None)
        result = ask(*given) if ask is not None else None
        result = list(result) if isinstance(result, Iterable) else result
    return result


def options_of(name: str, step: Step) -> list[Option]:
    """Return the places of this step where a technique can save, or an empty list if it fails."""
    return _asked(name, "options", step) or []


def edit_of(step: Step, option: Option) -> Edit | None:
    """Return an option's edit of the step, or None if it saves nothing or its technique fails."""
    edit = None
    with isolated("technique", option.technique):
        edit = _unit(option.technique).edits(step, option)
    return edit


def in_files_of(name: str, step: Step) -> list[Option]:
    """Return a technique's options that use files, or an empty list if it fails."""
    return _asked(name, "to_files", step) or []


def settled(step: Step, one: Technique) -> Technique:
    """Return a technique with its settings adjusted to all its places."""
    return _asked(one.name, "settled", step, one) or one


def refusals_of(name: str, step: Step) -> list[str]:
    """Return a technique's explanations of places where it could save but is not used."""
    return _asked(name, "refusals", step) or []


def page(name: str) -> str:
    """Return a technique's documentation in Markdown. Raises `UsageError` for an unknown name."""
    unit = technique(name)
    text = inspect.getdoc(importlib.import_module(type(unit).__module__)) or ""
    lists = {
        "Checked in each step": getattr(unit, "assumes", ()),
        "Assumed of later steps, and seen by no check": getattr(unit, "unseen", ()),
    }
    said = "".join(f"\n{what}: {'; '.join(each)}.\n" for what, each in lists.items() if each)
    return f"# {name}\n\nEquivalence: {unit.equivalence}\n\n{text}\n{said}"


def names() -> list[str]:
    """Return the names of all techniques: the files and folders of `torchtrim.techniques`."""
    return [one.name for one in pkgutil.iter_modules(importlib.import_module(_HOME).__path__)]


def exportable() -> list[str]:
    """Return the names of techniques that can be exported as plain PyTorch."""
    return [name for name, unit in units().items() if isinstance(unit, Exportable)]
