"""Has a program run in float64, and keep to it where it asks for float32 by name."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from torchtrim.records.trial import Request

_OLD_TYPES = (torch, "FloatTensor", "DoubleTensor"), (torch.cuda, "FloatTensor", "DoubleTensor")
_NAMES = {
    f"{module.__name__}.{one}": f"{module.__name__}.{other}" for module, one, other in _OLD_TYPES
}


def widen_old_types() -> None:
    """`torch.FloatTensor(2, 3)`, which no mode sees, makes float64 in this process from now on."""
    for module, narrow, wide in _OLD_TYPES:
        setattr(module, narrow, getattr(module, wide))


def prepare(root: nn.Module, request: Request) -> None:
    """Widen and nudge its parameters, as is requested."""
    if request.double:
        root.double()
    if request.nudged:
        with torch.no_grad():
            for parameter in root.parameters():
                if parameter.is_floating_point() and parameter.layout is torch.strided:
                    _nudge(parameter)


def _nudge(parameter: torch.Tensor) -> None:
    """Move each number by one rounding, up and down by turns."""
    signs = torch.ones(parameter.numel(), dtype=parameter.dtype, device=parameter.device)
    signs[1::2] = -1
    parameter.mul_(1 + torch.finfo(parameter.dtype).eps * signs.view(parameter.shape))


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
