"""Activation modules that write their result over their input, and back again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from torchtrim.errors import ApplyFailed
from torchtrim.techniques.handles import Handle, Handles
from torchtrim.techniques.places import module_at

if TYPE_CHECKING:
    from torch import nn

TYPES = frozenset(("ReLU", "LeakyReLU"))


def overwrite_places(roots: Mapping[str, nn.Module], where: Sequence[str]) -> Handle:
    """Set `inplace` on the named modules. Raises `ApplyFailed`, the model as it was."""
    overwriting = Handles()
    try:
        for place in where:
            overwriting.add(Overwriting(_activation(roots, place)))
    except BaseException:
        overwriting.revert()
        raise
    return overwriting


class Overwriting:
    """One module that overwrites its input."""

    def __init__(self, module: nn.Module) -> None:
        self._module, self._before = module, module.inplace
        module.inplace = True  # type: ignore[assignment]

    def revert(self) -> None:
        """Make the module what it was."""
        self._module.inplace = self._before


def _activation(roots: Mapping[str, nn.Module], where: str) -> nn.Module:
    module = module_at(roots, where)
    if type(module).__name__ not in TYPES or not hasattr(module, "inplace"):
        raise ApplyFailed(
            f"`{where}` is a {type(module).__name__}, which cannot overwrite its input; "
            f"{', '.join(sorted(TYPES))} can. Plan again for this model."
        )
    return module
