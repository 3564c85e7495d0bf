"""Has a program that runs in float64 keep to it where it asks for float32 by name."""

from __future__ import annotations

from typing import Any

import torch
from torch.overrides import TorchFunctionMode


class Wide(TorchFunctionMode):
    """What is cast to or made in float32 is in float64: `x.float()`, `softmax(x, -1, dtype=torch.float32)`.

    Else the program rounds to float32 itself, and by how much less two runs differ says nothing.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.Tensor.float:
            func = torch.Tensor.double
        named = {name: _wide(value) for name, value in (kwargs or {}).items()}
        return func(*map(_wide, args), **named)


def _wide(value: Any) -> Any:
    return torch.float64 if value is torch.float32 else value
