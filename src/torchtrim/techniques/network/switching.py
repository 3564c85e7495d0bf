"""Switches a technique on for the modules that a plan names, all of them or none."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from torchtrim.records.plan import Technique
from torchtrim.techniques.base import Handle
from torchtrim.techniques.network.aside import Aside
from torchtrim.techniques.network.planned import Planned
from torchtrim.techniques.places import module_at


class Switched:
    """What was switched on."""

    def __init__(self) -> None:
        self._handles: list[Handle] = []

    def add(self, handle: Handle) -> None:
        """One more."""
        self._handles.append(handle)

    def revert(self) -> None:
        """Take it all back, the last first."""
        while self._handles:
            self._handles.pop().revert()


def switch_on(roots: Mapping[str, nn.Module], technique: Technique) -> Switched:
    """Switch the technique on. Raises `ApplyFailed` for a place that is none, the modules as they were."""
    switched = Switched()
    try:
        for where in technique.where:
            module = module_at(roots, where)
            switched.add(Planned.of(module).switch_on(technique.name, technique.options))
            if technique.options.get("gradients"):
                switched.add(Aside(module))
    except BaseException:
        switched.revert()
        raise
    return switched
