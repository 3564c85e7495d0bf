"""Look up modules and optimizers by the places in a plan, and refuse its options."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from torchtrim.errors import ApplyFailed
from torchtrim.records.plan import Technique

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer

Span = tuple[int, int]
_WHERE = re.compile(r"(?P<path>[^\[\]]+)(?:\[(?P<first>\d+):(?P<last>\d+)\])?")


def module_at(roots: Mapping[str, nn.Module], where: str) -> nn.Module:
    """Return the module at a path such as `Net.features`. Raises `ApplyFailed` if there is none."""
    name, _, path = where.partition(".")
    try:
        return roots[name].get_submodule(path)
    except (KeyError, AttributeError):
        raise ApplyFailed(
            f"the plan names `{where}`, but there is no such module; the roots of this workload are "
            f"{', '.join(roots)}. Plan again for this model."
        ) from None


class ModulePart(NamedTuple):
    """A module, or a range of a Sequential."""

    module: nn.Module
    span: Span | None

    @property
    def chain(self) -> nn.Sequential:
        """The Sequential that contains the range."""
        return cast("nn.Sequential", self.module)


def part_at(roots: Mapping[str, nn.Module], where: str) -> ModulePart:
    """Return the part at a place such as `Net.blocks.3` or `Net.layers[2:6]`. Raises `ApplyFailed` if there
    is none."""
    match = _WHERE.fullmatch(where)
    if match is None:
        raise ApplyFailed(
            f"cannot read {where!r} as a place. Write a module's path, such as Net.blocks.3, or a "
            "range of a Sequential, such as Net.layers[2:6]."
        )
    module = module_at(roots, match["path"])
    if not match["first"]:
        return ModulePart(module, None)
    # Compare by name, so that torch is not imported here.
    if "Sequential" not in (kind.__name__ for kind in type(module).__mro__):
        raise ApplyFailed(f"`{where}` is a range, but that module is not an nn.Sequential.")
    return ModulePart(module, (int(match["first"]), int(match["last"])))


def optimizer_at(roots: Mapping[str, Any], where: str) -> Optimizer:
    """Return the optimizer of that name. Raises `ApplyFailed` if there is none."""
    optimizer = roots.get(where)
    if not hasattr(optimizer, "param_groups"):
        raise ApplyFailed(
            f"the plan names the optimizer `{where}`, but this script has only {', '.join(roots)}. "
            "Plan again for this script."
        )
    return cast("Optimizer", optimizer)


def wrong_options(technique: Technique, takes: str) -> ApplyFailed:
    """Return the error for a plan with other options than the technique `takes`, in words."""
    return ApplyFailed(
        f"{technique.name} has {takes}; the plan has {dict(technique.options)!r}. Correct it, or plan again."
    )


def root_of(where: str) -> str:
    """Return the name of the root that contains a place."""
    return re.split(r"[.\[:]", where, maxsplit=1)[0]
