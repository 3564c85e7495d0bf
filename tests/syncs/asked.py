"""An operator as the table is asked about it, with plain tensors of which some are said to be on a device."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Asked:
    """An operator and its arguments; `device` and `pinned` hold the tensors that are there."""

    name: str
    args: Mapping[str, Any]
    device: tuple[Tensor, ...] = ()
    pinned: tuple[Tensor, ...] = ()
    result: Any = field(default=None)

    def is_on_device(self, tensor: Any) -> bool:
        """Whether it is one of those said to be on the device."""
        return any(tensor is one for one in self.device)

    def is_pinned(self, tensor: Any) -> bool:
        """Whether it is one of those said to be pinned."""
        return any(tensor is one for one in self.pinned)


def schema_defaults(operator: str) -> dict[str, Any]:
    """The default arguments of an operator, `aten::name.overload`."""
    name, _, overload = operator.removeprefix("aten::").partition(".")
    found = getattr(getattr(torch.ops.aten, name), overload or "default")
    return {one.name: one.default_value for one in found._schema.arguments}
