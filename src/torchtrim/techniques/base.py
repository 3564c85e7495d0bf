"""What a technique is, and the one registry of them."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

from torchtrim.errors import UsageError
from torchtrim.records.finding import Equivalence
from torchtrim.records.plan import Technique
from torchtrim.records.profile import Profile

if TYPE_CHECKING:
    from torch import nn


class Span(NamedTuple):
    """Operators `first <= i < last` of the forward that would run again in backward."""

    first: int
    last: int


class Option(NamedTuple):
    """A place at which a technique can save. `spans`: one for each forward call of the place.

    `cut`: of a range of a chain, the chain and where the range begins and ends. `overwriting`: operators
    that write their result over their input, which costs no time.
    """

    technique: str
    where: str
    spans: tuple[Span, ...]
    cut: tuple[str, int, int] | None = None
    overwriting: tuple[int, ...] = ()


class Handle(Protocol):
    """An applied technique."""

    def revert(self) -> None:
        """Make the model what it was."""
        ...


class Handles:
    """Several applied techniques or changed modules, reverted together."""

    def __init__(self) -> None:
        self._handles: list[Handle] = []

    def add(self, handle: Handle) -> None:
        """One more."""
        self._handles.append(handle)

    def revert(self) -> None:
        """Make everything what it was, the last first."""
        while self._handles:
            self._handles.pop().revert()


class TechniqueUnit(Protocol):
    """One technique: `options` reads a profile, `apply` changes live modules."""

    name: str
    equivalence: Equivalence

    def options(self, profile: Profile) -> Sequence[Option]:
        """The places of this profile at which the technique can save."""
        ...

    def apply(self, roots: Mapping[str, nn.Module], technique: Technique) -> Handle:
        """Change the modules that `technique.where` names. Raises `ApplyFailed`, the model as it was."""
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


def names() -> list[str]:
    """All techniques: every file of this folder but those that serve them."""
    from torchtrim import techniques

    return [m.name for m in pkgutil.iter_modules(techniques.__path__) if m.name not in _SERVING]


_SERVING = (
    "apply",
    "arguments",
    "base",
    "blocks",
    "by_graph",
    "fingerprint",
    "network",
    "places",
    "python_state",
    "rerun",
    "swap",
)
