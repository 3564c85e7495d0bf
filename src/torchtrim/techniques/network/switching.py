"""Switches a technique on for the modules that a plan names, all of them or none."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from torchtrim.records.plan import Technique
from torchtrim.techniques.base import Handles
from torchtrim.techniques.network.aside import Aside
from torchtrim.techniques.network.planned import Planned
from torchtrim.techniques.places import module_at


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
