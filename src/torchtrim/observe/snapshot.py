"""Takes down the state of a model and its optimizer, and puts it back: the very same tensors."""

from __future__ import annotations

import random
import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from torchtrim.errors import Unsupported
from torchtrim.observe.recording import tensors_in


class Snapshot:
    """Parameters, buffers, gradients, optimizer state and every random generator, as they were."""

    def __init__(
        self, modules: Sequence[nn.Module], optimizers: Sequence[torch.optim.Optimizer]
    ) -> None:
        self._modules = list(dict.fromkeys(m for root in modules for m in root.modules()))
        self._optimizers = list(optimizers)
        self._tensors: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._gradients: list[tuple[torch.Tensor, torch.Tensor | None]] = []
        self._buffers = [(m, dict(m._buffers), m.training) for m in self._modules]
        self._states = [
            (
                {p: _shallow(state) for p, state in o.state.items()},
                [{k: v for k, v in group.items() if k != "params"} for group in o.param_groups],
            )
            for o in self._optimizers
        ]
        self._random = _random_state()
        with torch.no_grad():
            self._take()

    def _take(self) -> None:
        parameters = [p for m in self._modules for p in m._parameters.values() if p is not None]
        parameters += [p for o in self._optimizers for g in o.param_groups for p in g["params"]]
        for parameter in dict.fromkeys(parameters):
            if is_lazy(parameter):
                raise Unsupported(
                    "the model has lazy parameters that have no shape yet. "
                    "Run it once on a batch, then hand it over."
                )
            self._keep(parameter)
            self._gradients.append((parameter, parameter.grad))
            if parameter.grad is not None:
                self._keep(parameter.grad)
        for _, buffers, _ in self._buffers:
            for buffer in buffers.values():
                if buffer is not None:
                    self._keep(buffer)
        for states, _ in self._states:
            for state in states.values():
                for tensor in tensors_in(state):
                    self._keep(tensor)

    def restore(self) -> None:
        """Put everything back."""
        with torch.no_grad():
            for tensor, value in self._tensors:
                tensor.copy_(value)
        for parameter, gradient in self._gradients:
            parameter.grad = gradient
        for module, buffers, training in self._buffers:
            module._buffers.update(buffers)
            module.training = training
        for optimizer, (states, groups) in zip(self._optimizers, self._states, strict=True):
            optimizer.state.clear()
            optimizer.state.update({p: _shallow(state) for p, state in states.items()})
            for group, values in zip(optimizer.param_groups, groups, strict=True):
                group.update(values)
        _set_random_state(self._random)

    def _keep(self, tensor: torch.Tensor) -> None:
        self._tensors.append((tensor, tensor.detach().clone()))


def _shallow(state: Any) -> Any:
    return dict(state) if isinstance(state, dict) else state


def _random_state() -> dict[str, Any]:
    state: dict[str, Any] = {"python": random.getstate(), "torch": torch.get_rng_state()}
    if "numpy" in sys.modules:
        state["numpy"] = sys.modules["numpy"].random.get_state()
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state_all()
    return state


def _set_random_state(state: dict[str, Any]) -> None:
    random.setstate(state["python"])
    torch.set_rng_state(state["torch"])
    if "numpy" in state:
        sys.modules["numpy"].random.set_state(state["numpy"])
    if "cuda" in state:
        torch.cuda.set_rng_state_all(state["cuda"])
