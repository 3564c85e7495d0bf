"""What techniques have in common that run a module by its graph, in calls without gradients."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from torchtrim.executor.registry import Handle, Option
from torchtrim.records.finding import Equivalence
from torchtrim.records.plan import Technique
from torchtrim.step.step import Step

if TYPE_CHECKING:
    from torch import nn


class ByGraph:
    """A technique whose `where` names modules, which run by their graphs (`executor.network`)."""

    name = ""
    equivalence: Equivalence = "BITWISE"

    def options(self, step: Step) -> Sequence[Option]:
        """None: it is for calls without gradients, which the planner of training does not plan."""
        return ()

    def edits(self, step: Step, option: Option) -> None:
        """None, since there are no options."""

    def apply(self, roots: Mapping[str, nn.Module], technique: Technique) -> Handle:
        """Make the named modules run by their graphs. Raises `ApplyFailed`, the model as it was."""
        from torchtrim.executor.network.switching import switch_on

        return switch_on(roots, technique)
