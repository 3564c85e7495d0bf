"""Base of techniques that run a module by its graph, in calls without gradients."""

from __future__ import annotations

from collections.abc import Sequence

from torchtrim.executor.registry import Handle, Option, Roots, TechniqueUnit
from torchtrim.records.finding import Equivalence
from torchtrim.records.plan import Technique
from torchtrim.step.step import Step


class ByGraph(TechniqueUnit):
    """A technique that runs the modules in `where` by their graphs (`executor.network`)."""

    name = ""
    equivalence: Equivalence = "BITWISE"

    def options(self, step: Step) -> Sequence[Option]:
        """Return no options: the planner of training steps does not plan calls without gradients."""
        return ()

    def edits(self, step: Step, option: Option) -> None:
        """Return None: `options` is always empty."""

    def apply(self, roots: Roots, technique: Technique) -> Handle:
        """Make the modules run by their graphs. Raises `ApplyFailed` and leaves the model unchanged."""
        from torchtrim.executor.network.switching import switch_on

        return switch_on(roots, technique)
