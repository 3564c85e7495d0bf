"""The type of a rule."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from torchtrim.records.finding import Finding
from torchtrim.records.profile import Profile

HEADINGS = (
    "What it does",
    "Why is this bad?",
    "Example",
    "Use instead",
    "Fix safety",
    "References",
)


@dataclass(frozen=True, kw_only=True)
class Rule:
    """A pattern that wastes memory or time.

    `name` names the pattern, not its fix. `check` finds it in a profile. The docstring of the module that
    defines `check` is the rule's documentation: a line of summary, then Markdown under `HEADINGS`. An
    `on_request` rule runs only if its code is selected. `across`, if given, finds the pattern in the
    profiles of several ranks instead.
    """

    code: str
    name: str
    check: Callable[[Profile], Iterable[Finding]]
    on_request: bool = False
    across: Callable[[Sequence[Profile]], Iterable[Finding]] | None = None

    @property
    def stem(self) -> str:
        """Name of the rule's file, page and test."""
        return self.check.__module__.rpartition(".")[2]

    @property
    def page(self) -> str:
        """The rule's documentation, in Markdown."""
        return inspect.cleandoc(sys.modules[self.check.__module__].__doc__ or "")

    @property
    def summary(self) -> str:
        """The pattern in a sentence."""
        return self.page.partition("\n")[0]
