"""Switches a technique on for the modules that a plan names, all of them or none."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from torchtrim.executor.network.planned import Planned
from torchtrim.executor.network.stash import Aside
from torchtrim.executor.places import module_at
from torchtrim.executor.registry import Handles
from torchtrim.records.plan import Technique


def switch_on(roots: Mapping[str, nn.Module], technique: Technique) -> Handles:
    """Switch the technique on. Raises `ApplyFailed` for an unknown place, the modules as they were."""
    switched = Handles()
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
