"""Models whose modules give and take what most do not: scalars, empty tensors, tuples, dicts, None."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from torchtrim import Profile, TrainStep, record


class Function(nn.Module):
    """A function as a module, over a layer of its own."""

    def __init__(self, function: Callable[[Tensor], Any], layer: nn.Module | None = None) -> None:
        super().__init__()
        self.layer = layer or nn.Linear(8, 16)
        self.function = function

    def forward(self, x: Tensor) -> Any:
        return self.function(self.layer(x))


ODD: dict[str, Callable[[Tensor], Any]] = {
    "scalar": lambda x: x.pow(2).mean(),
    "one element": lambda x: x.square().mean().reshape(1),
    "one row": lambda x: torch.relu(x.mean(0, keepdim=True)),
    "scalar times": lambda x: x.relu().sum() * x.tanh().mean(),
    "scalar of scalars": lambda x: torch.stack([row.mean() for row in x[:3]]).relu().sum(),
    "loss": lambda x: nn.functional.cross_entropy(x, torch.zeros(len(x), dtype=torch.long)),
    "losses": lambda x: nn.functional.cross_entropy(
        x, torch.zeros(len(x), dtype=torch.long), reduction="none"
    ),
    "empty rows": lambda x: torch.relu(x[:0]),
    "empty columns": lambda x: torch.tanh(x[:, :0]) * 2,
    "empty loss": lambda x: nn.functional.cross_entropy(
        x[:0], torch.zeros(0, dtype=torch.long), reduction="sum"
    ),
    "empty norm": lambda x: nn.functional.layer_norm(x[:0], (x.shape[-1],)),
    "empty batch norm": lambda x: nn.functional.batch_norm(
        x[:, :, None][..., :0], None, None, training=True
    ),
    "scalar softmax": lambda x: torch.log_softmax(x.mean(), 0) + x.mean(),
    "scalar dropout": lambda x: nn.functional.dropout(x.mean(), 0.5, training=True),
    "scalar attention": lambda x: nn.functional.scaled_dot_product_attention(
        *[x.reshape(1, 1, -1, 4)[:, :, :1]] * 3
    ),
    "empty attention": lambda x: nn.functional.scaled_dot_product_attention(
        *[x.reshape(1, 1, -1, 4)[:, :, :0]] * 3
    ),
    "vector": lambda x: x[0],
    "vector product": lambda x: x @ x[0],
    "dot": lambda x: torch.dot(x[0].relu(), x[1]),
    "None": lambda x: None,
    "number": lambda x: 3,
    "tuple": lambda x: (x.relu(), None, x.sum()),
    "empty tuple": lambda x: (),
    "dict": lambda x: {"loss": x.square().mean(), "logits": x, "none": None, "inner": {"x": [x]}},
    "twice the same": lambda x: (x, x),
    "complex": lambda x: torch.fft.fft(x),
    "expanded": lambda x: x.mean().expand(4, 5),
    "integers": lambda x: x.argmax(-1),
    "padded": lambda x: nn.functional.pad(x.sum().reshape(1, 1), (0, 2)),
    "detached": lambda x: x.detach().mean(),
}

LAYERS: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Linear(8, 16),
    "wide": lambda: nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 16)),
    "norm": lambda: nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU6()),
    "inner scalar": lambda: nn.Sequential(nn.Linear(8, 64), Scaled()),
}


class Scaled(nn.Module):
    """What it is given, times a scalar that a module of its own makes."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = Function(lambda x: x.square().mean().sqrt(), nn.Linear(64, 128))
        self.act, self.last = nn.ReLU(), nn.Linear(64, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.act(self.scale(x)) * x)


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    inner = value.values() if isinstance(value, Mapping) else value
    return [one for part in inner for one in _tensors(part)] if hasattr(inner, "__iter__") else []


class Odd(nn.Module):
    """A block that is plain, and modules that are not; the loss is of all that they return."""

    def __init__(self, layer: str, *functions: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 8))
        self.odd = nn.ModuleList(Function(ODD[name], LAYERS[layer]()) for name in functions)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        made = [one for odd in self.odd for one in _tensors(odd(x)) if one.requires_grad]
        return sum((one.abs().sum() for one in made), start=x.square().mean())


def step_of(layer: str, *functions: str) -> TrainStep:
    """A step of such a model, which returns its own loss."""
    model = Odd(layer, *functions)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    return TrainStep(model, lambda model, x: model(x), optimizer, torch.randn(32, 8))


@functools.cache
def profile_of(layer: str) -> Profile:
    """What is recorded of a step with every odd function behind such a layer."""
    return record(step_of(layer, *ODD))
