"""Placeholders for gradients consumed in backward, and callbacks for updates in backward."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch

from torchtrim.emulator.device import current
from torchtrim.errors import ApplyFailed

UpdateCallback = Callable[[torch.optim.Optimizer, torch.Tensor], None]
_watching: list[tuple[UpdateCallback, UpdateCallback]] = []


class Spent(torch.Tensor):
    """The `grad` of a parameter whose gradient was consumed. It has no memory; reading it raises."""

    optimizer_name: str
    _parameter: weakref.ref[torch.Tensor]

    @staticmethod
    def __new__(cls, parameter: torch.Tensor, where: str) -> Spent:
        """Create one for a parameter whose gradient the optimizer `where` has used."""
        emulation = current()
        tags = emulation.accelerator.tags if emulation is not None else None
        emulated = tags is not None and tags.on_device(parameter)
        spent: Spent = torch.Tensor._make_wrapper_subclass(
            cls,
            parameter.shape,
            dtype=parameter.dtype,
            layout=parameter.layout,
            device=torch.device("cpu") if emulated else parameter.device,
            storage_size=0,
        )
        if tags is not None and emulated:
            tags.put(spent)
        spent.optimizer_name, spent._parameter = where, weakref.ref(parameter)
        return spent

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return [], None

    def _become_zeros(self) -> None:
        parameter = self._parameter()
        if parameter is not None and parameter.grad is self:
            parameter.grad = torch.zeros_like(parameter)

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"<a gradient that {self.optimizer_name} used up in backward>"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Raise: the optimizer has used the gradient. Zeroing it makes zeros, as in the original."""
        if func.name() in ("aten::zero_", "aten::_foreach_zero_"):
            (given,) = args
            for one in given if isinstance(given, (tuple, list)) else (given,):
                one._become_zeros() if isinstance(one, Spent) else one.zero_()
            return given if func.name() == "aten::zero_" else None
        error = ApplyFailed(
            f"`{func.name()}` reads or adds to a gradient after backward, but the plan's "
            "optimizer_in_backward has used it up: gradients that are clipped, scaled, logged or kept cannot "
            "be used up early. Remove that technique from the plan, or the code that reads gradients from "
            "the script."
        )
        error._torchtrim_place = _name((args, kwargs))  # type: ignore[attr-defined]
        raise error


def watch_updates(starts: UpdateCallback, ends: UpdateCallback) -> Callable[[], None]:
    """Call `starts` before and `ends` after each update in backward; return a function that stops it."""
    pair = starts, ends
    _watching.append(pair)
    return lambda: _watching.remove(pair)


@contextlib.contextmanager
def updating(optimizer: torch.optim.Optimizer, parameter: torch.Tensor) -> Iterator[None]:
    """Report the update of a parameter in backward, inside the block; its gradient is available."""
    for starts, _ in _watching:
        starts(optimizer, parameter)
    try:
        yield
    finally:
        for _, ends in _watching:
            ends(optimizer, parameter)


def _name(values: Any) -> str:
    if isinstance(values, Spent):
        return values.optimizer_name
    inner = list(values.values()) if isinstance(values, dict) else values
    if not isinstance(inner, (tuple, list)):
        return ""
    return next(filter(None, map(_name, inner)), "")
