"""What a technique is, and the one registry of them."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, runtime_checkable

from torchtrim.core.isolation import isolated
from torchtrim.errors import UsageError
from torchtrim.executor.handles import Handle as Handle
from torchtrim.executor.handles import Handles as Handles
from torchtrim.executor.handles import all_or_none as all_or_none
from torchtrim.records.finding import Equivalence
from torchtrim.records.plan import Technique
from torchtrim.step.edits import Edit
from torchtrim.step.step import Span, Step

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer

    Root = nn.Module | Optimizer
    """What a plan is applied to, by name: a module that is called at top level, or an optimizer."""


_HOME = "torchtrim.techniques"
Settings = tuple[tuple[str, str | int | float | bool], ...]


class Option(NamedTuple):
    """A place at which a technique can save.

    `where` is what a plan writes. `spans`: the tasks of each forward call of the place. `cut`: of a range of
    a chain, the chain and where the range begins and ends. `settings`: what the plan writes besides.
    `equivalence`: this option's, where it is less equal than the technique's best.
    """

    technique: str
    where: str
    spans: tuple[Span, ...] = ()
    cut: tuple[str, int, int] | None = None
    settings: Settings = ()
    equivalence: Equivalence | None = None


class TechniqueUnit(Protocol):
    """One technique: `options` and `edits` read a step, `apply` changes live modules or optimizers.

    One to which a plan may give options names them in `takes`.
    """

    name: str
    equivalence: Equivalence

    def options(self, step: Step) -> Sequence[Option]:
        """The places of this step at which the technique can save."""
        ...

    def edits(self, step: Step, option: Option) -> Edit | None:
        """What an option changes in the step; None if it saves nothing after all."""
        ...

    def apply(self, roots: Mapping[str, Any], technique: Technique) -> Handle:
        """Change what `technique.where` names. Raises `ApplyFailed`, the model as it was."""
        ...


@runtime_checkable
class Settles(Protocol):
    """A technique of which more can be said when it is known at which places a plan uses it."""

    def settled(self, step: Step, technique: Technique) -> Technique:
        """The technique as a plan writes it."""
        ...


@runtime_checkable
class ToFiles(Protocol):
    """A technique that can keep in a memory-mapped file what it keeps on the host."""

    def to_files(self, step: Step) -> Sequence[Option]:
        """What it can do with files; each excludes the option that is the same on the host."""
        ...


class Plain(NamedTuple):
    """A function that does what a technique does, and needs nothing of torchtrim but other such files.

    `function` of the module `module` is called with the roots by name, the places, and the technique's
    options by name; it returns what has `revert()`.
    """

    module: str
    function: str


@runtime_checkable
class Exportable(Protocol):
    """A technique that can be written as plain PyTorch says with what."""

    def export(self) -> Plain:
        """The function that replaces `apply` where there is no torchtrim."""
        ...


@runtime_checkable
class Measured(Protocol):
    """A technique of which it is measured what it saves.

    Its `edits` are None, since no edit of the recorded step says what is left: the planner gets the step that
    was recorded with the technique applied. `helps`: the techniques that it makes possible. `ways`: how many
    of the settings that it offers, the first, a plan may choose; others are for a person to pin.
    """

    helps: tuple[str, ...]
    ways: int

    def bars(self, technique: Technique) -> Collection[str]:
        """The techniques that cannot be in one plan with this one."""
        ...


@runtime_checkable
class Replaces(Measured, Protocol):
    """A SEMANTIC technique: it makes another function of the step."""

    def by_hand(self, roots: Mapping[str, Any], technique: Technique) -> Handle:
        """The same replacement, as a person would write it into the program; the certificate compares."""
        ...

    def advice(self, technique: Technique) -> str:
        """What else a person has to do or know, as a clause; empty for nothing."""
        ...


@runtime_checkable
class Refuses(Protocol):
    """A technique that can say where it would save and is not used, why, and what it would cost."""

    def refusals(self, step: Step) -> Iterable[str]:
        """A sentence for each such place."""
        ...


def technique(name: str) -> TechniqueUnit:
    """The technique of that name. Raises `UsageError` where there is none."""
    known = names()
    if name not in known:
        raise UsageError(
            f"there is no technique {name!r} in this torchtrim; it has {', '.join(known)}. "
            "A plan made by a newer torchtrim needs that version."
        )
    return _unit(name)


def check_known(one: Technique) -> None:
    """Raise `UsageError` for a technique, or an option of it, that this torchtrim does not have."""
    takes: Collection[str] = getattr(technique(one.name), "takes", ())
    unknown = sorted(set(one.options) - set(takes))
    if unknown:
        has = f"it has {', '.join(takes)}" if takes else "it has none"
        raise UsageError(
            f"{one.name} has no option {unknown[0]!r}, which the plan gives it; {has}. Correct or remove "
            "it, or plan again. A plan made by a newer torchtrim needs that version."
        )


def _unit(name: str) -> TechniqueUnit:
    """`TECHNIQUE` of the file of that name, or of `technique.py` in the folder of that name."""
    home = importlib.import_module(f"{_HOME}.{name}")
    if hasattr(home, "__path__"):
        home = importlib.import_module(f"{home.__name__}.technique")
    unit: TechniqueUnit = home.TECHNIQUE
    return unit


def units(exclude: Collection[str] = ()) -> dict[str, TechniqueUnit]:
    """The techniques by name; not those excluded, and not those whose file cannot be imported."""
    found = {}
    for name in names():
        if name not in exclude:
            with isolated("technique", name):
                found[name] = technique(name)
    return found


def options_of(name: str, step: Step) -> list[Option]:
    """The places of this step at which a technique can save; none where it fails."""
    found: list[Option] = []
    with isolated("technique", name):
        found = list(technique(name).options(step))
    return found


def edit_of(step: Step, option: Option) -> Edit | None:
    """What an option changes in the step; None where it saves nothing, or its technique fails."""
    edit = None
    with isolated("technique", option.technique):
        edit = _unit(option.technique).edits(step, option)
    return edit


def in_files_of(name: str, step: Step) -> list[Option]:
    """What a technique can do with files; nothing where it fails."""
    found: list[Option] = []
    with isolated("technique", name):
        unit = technique(name)
        found = list(unit.to_files(step)) if isinstance(unit, ToFiles) else []
    return found


def settled(step: Step, one: Technique) -> Technique:
    """A technique with what can be said of all its places together."""
    found = one
    with isolated("technique", one.name):
        unit = technique(one.name)
        found = unit.settled(step, one) if isinstance(unit, Settles) else one
    return found


def refusals_of(name: str, step: Step) -> list[str]:
    """What a technique says of the places at which it would save and is not used."""
    found: list[str] = []
    with isolated("technique", name):
        unit = technique(name)
        found = list(unit.refusals(step)) if isinstance(unit, Refuses) else []
    return found


def page(name: str) -> str:
    """What a technique does, in Markdown: its file's docstring. Raises `UsageError` for an unknown one."""
    unit = technique(name)
    text = inspect.getdoc(importlib.import_module(type(unit).__module__)) or ""
    return f"# {name}\n\nEquivalence: {unit.equivalence}\n\n{text}\n"


def names() -> list[str]:
    """All techniques: every file and folder of `torchtrim.techniques`."""
    folders = importlib.import_module(_HOME).__path__
    return [one.name for one in pkgutil.iter_modules(folders)]


def exportable() -> list[str]:
    """The techniques that can be written as plain PyTorch."""
    return [name for name, unit in units().items() if isinstance(unit, Exportable)]
