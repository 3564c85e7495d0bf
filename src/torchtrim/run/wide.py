"""Has a program that runs in float64 keep to it where it asks for float32 by name."""

from __future__ import annotations

from typing import Any

import torch
from torch.overrides import TorchFunctionMode

_OLD_TYPES = (torch, "FloatTensor", "DoubleTensor"), (torch.cuda, "FloatTensor", "DoubleTensor")
_NAMES = {
    f"{module.__name__}.{one}": f"{module.__name__}.{other}" for module, one, other in _OLD_TYPES
}


def widen_old_types() -> None:
    """`torch.FloatTensor(2, 3)`, which no mode sees, makes float64 in this process from now on."""
    for module, narrow, wide in _OLD_TYPES:
        setattr(module, narrow, getattr(module, wide))


class Wide(TorchFunctionMode):
    """What is cast to or made in float32 is in float64: `x.float()`, `softmax(x, -1, dtype=torch.float32)`,
    `x.type("torch.FloatTensor")`.

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
    if isinstance(value, str):
        return _NAMES.get(value, value)
    return torch.float64 if value is torch.float32 else value
