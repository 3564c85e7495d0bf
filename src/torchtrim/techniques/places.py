"""The modules that a plan's places name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from torchtrim.errors import ApplyFailed

if TYPE_CHECKING:
    from torch import nn


def module_at(roots: Mapping[str, nn.Module], where: str) -> nn.Module:
    """The module at a path such as `Net.features`. Raises `ApplyFailed` where there is none."""
    name, _, path = where.partition(".")
    try:
        return roots[name].get_submodule(path)
    except (KeyError, AttributeError):
        raise ApplyFailed(
            f"the plan names `{where}`, and there is no such module; the roots of this workload are "
            f"{', '.join(roots)}. Plan again for this model."
        ) from None
