"""The type of a rule."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from torchtrim.analysis.syncs import waiting_findings
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

    `name` names the pattern, not its fix. `check` finds it in a profile; or `across`, in those of all ranks,
    of which there may be one. The docstring of the module that defines it is the rule's documentation: a line
    of summary, then Markdown under `HEADINGS`. An `on_request` rule runs only if its code is selected.
    """

    code: str
    name: str
    check: Callable[[Profile], Iterable[Finding]] | None = None
    on_request: bool = False
    across: Callable[[Sequence[Profile]], Iterable[Finding]] | None = None

    @property
    def _home(self) -> str:
        function = self.check or self.across
        assert function is not None, f"{self.code} has neither `check` nor `across`"
        return function.__module__

    @property
    def stem(self) -> str:
        """Name of the rule's file, page and test."""
        return self._home.rpartition(".")[2]

    @property
    def page(self) -> str:
        """The rule's documentation, in Markdown."""
        return inspect.cleandoc(sys.modules[self._home].__doc__ or "")

    @property
    def summary(self) -> str:
        """The pattern in a sentence."""
        return self.page.partition("\n")[0]


def waiting(module: str, code: str, name: str) -> Rule:
    """Return the rule about the lines with syncs of a code, documented in a module."""

    def check(profile: Profile) -> Iterable[Finding]:
        return waiting_findings(profile, code)

    check.__module__ = module
    return Rule(code=code, name=name, check=check)
