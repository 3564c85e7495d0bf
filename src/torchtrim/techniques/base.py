"""What a technique is, and the one registry of them."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, runtime_checkable

from torchtrim.errors import UsageError
from torchtrim.records.finding import Equivalence
from torchtrim.records.plan import Technique
from torchtrim.step.edits import Edit
from torchtrim.step.step import Span, Step
from torchtrim.techniques.handles import Handle as Handle
from torchtrim.techniques.handles import Handles as Handles
from torchtrim.techniques.handles import all_or_none as all_or_none

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer

    Root = nn.Module | Optimizer
    """What a plan is applied to, by name: a module that is called at top level, or an optimizer."""


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
    """One technique: `options` and `edits` read a step, `apply` changes live modules or optimizers."""

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
    """The technique of that name: `TECHNIQUE` in the file of the same stem in this folder."""
    known = names()
    if name not in known:
        raise UsageError(
            f"there is no technique {name!r} in this torchtrim; it has {', '.join(known)}. "
            "A plan made by a newer torchtrim needs that version."
        )
    unit: TechniqueUnit = importlib.import_module(f"{__package__}.{name}").TECHNIQUE
    return unit


def page(name: str) -> str:
    """What a technique does, in Markdown: its file's docstring. Raises `UsageError` for an unknown one."""
    unit = technique(name)
    text = inspect.getdoc(importlib.import_module(type(unit).__module__)) or ""
    return f"# {name}\n\nEquivalence: {unit.equivalence}\n\n{text}\n"


def names() -> list[str]:
    """All techniques: every file of this folder but those that serve them."""
    from torchtrim import techniques

    return [m.name for m in pkgutil.iter_modules(techniques.__path__) if m.name not in _SERVING]


def exportable() -> list[str]:
    """The techniques that can be written as plain PyTorch."""
    return [name for name in names() if isinstance(technique(name), Exportable)]


_SERVING = (
    "apply",
    "arguments",
    "base",
    "batch_parts",
    "blocks",
    "by_channels",
    "by_graph",
    "by_rows",
    "casting",
    "chains",
    "early_stop",
    "early_update",
    "exchanging",
    "export",
    "failing",
    "fingerprint",
    "handles",
    "head",
    "hooks",
    "host_state",
    "lowered",
    "narrow_sizes",
    "narrow_states",
    "network",
    "norms",
    "numbering",
    "once",
    "overheads",
    "overwriting",
    "places",
    "python_state",
    "rerun",
    "scratch",
    "sharding",
    "stepping",
    "swap",
)
