"""The modules that a plan's places name."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, cast

from torchtrim.errors import ApplyFailed

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer


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


def optimizer_at(roots: Mapping[str, Any], where: str) -> Optimizer:
    """The optimizer of that name. Raises `ApplyFailed` where there is none."""
    found = roots.get(where)
    if not hasattr(found, "param_groups"):
        raise ApplyFailed(
            f"the plan names the optimizer `{where}`, and there is none of that name; there are "
            f"{', '.join(roots)}. Plan again for this script."
        )
    return cast("Optimizer", found)


def root_of(where: str) -> str:
    """The name of the root that a place is in."""
    return re.split(r"[.\[:]", where, maxsplit=1)[0]
