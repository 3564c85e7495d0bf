"""A piece of user code, how often it waits for a CUDA device, and the public source that says so."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torchtrim.sync.table.base import Evidence

Body = Callable[[], object]
Setup = Callable[[], Body]


@dataclass(frozen=True, kw_only=True)
class Thread:
    """A public thread that counted, or that removed the wait and saw it gone."""

    repository: str
    number: int
    note: str

    @property
    def url(self) -> str:
        """Where to read it."""
        return f"https://github.com/{self.repository}/issues/{self.number}"


Label = Evidence | Thread


@dataclass(frozen=True, kw_only=True)
class Snippet:
    """`setup` makes what is there before, and returns the body, which waits `waits` times.

    Where `exact` is False it waits at least so often. `repairs` names the snippet that this one is the
    repaired form of. The labels stand in `evidence`, whatever a tool says.
    """

    name: str
    family: str
    setup: Setup
    waits: int
    evidence: tuple[Label, ...]
    exact: bool
    repairs: str


SNIPPETS: dict[str, Snippet] = {}


def snippet(
    waits: int, *evidence: Label, exact: bool = True, repairs: Snippet | None = None
) -> Callable[[Setup], Snippet]:
    """Enter a function into the corpus: it prepares, and returns the body."""

    def enter(setup: Setup) -> Snippet:
        name = setup.__name__
        assert name not in SNIPPETS, name
        found = Snippet(
            name=name,
            family=setup.__module__.rpartition(".")[2],
            setup=setup,
            waits=waits,
            evidence=evidence,
            exact=exact,
            repairs=repairs.name if repairs else "",
        )
        SNIPPETS[name] = found
        return found

    return enter
