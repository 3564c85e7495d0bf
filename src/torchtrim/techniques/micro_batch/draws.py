"""Random numbers for a part of the batch: those its samples get when the whole batch draws them.

Each part starts with the generator's state from before the call. Random operators draw the numbers of all
samples, and the part takes its own, so each part leaves the generator as the whole batch would.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from torchtrim.dispatch.modes import call_operator
from torchtrim.errors import ApplyFailed
from torchtrim.techniques.micro_batch.rows import SampleLayout, SampleRows, order_of

SHARED = -1  # dimension of numbers that all samples share
_INTO_SELF = frozenset(
    f"aten::{name}_"
    for name in ("bernoulli", "uniform", "normal", "exponential", "random", "geometric", "cauchy")
)
_LIKE = frozenset(("aten::rand_like", "aten::randn_like", "aten::randint_like"))
_OF_SIZE = frozenset(("aten::rand", "aten::randn"))
_DROPOUT = "aten::native_dropout"


class DrawRecorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records the shape and memory order of each random operator's result."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: list[str] = []
        self.shapes: list[tuple[int, ...]] = []
        self.orders: list[tuple[int, ...]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # Attention has this tag, but draws only with dropout.
        seeded = torch.Tag.nondeterministic_seeded in func.tags
        before = None if can_be_split(func._schema.name) else _states() if seeded else ()
        made = call_operator(func, args, kwargs or {})
        if before is None or (before and not all(map(torch.equal, before, _states()))):
            first = made[0] if isinstance(made, (tuple, list)) else made
            self.names.append(func._schema.name)
            self.shapes.append(tuple(first.shape))
            self.orders.append(order_of(first))
        return made


class Draws(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Gives a part the random numbers of its rows. `along`: the samples' layout in each drawn tensor."""

    def __init__(self, along: Sequence[SampleLayout], rows: SampleRows) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._along = along
        self._rows = rows
        self._count = 0

    def __exit__(self, kind: Any, *error: Any) -> None:
        super().__exit__(kind, *error)  # type: ignore[no-untyped-call]
        if kind is None and self._count != len(self._along):
            raise ApplyFailed(
                f"{self._count} operators draw random numbers, {len(self._along)} in the first batch, so a "
                "part cannot get its own. Take micro_batch out of the plan."
            )

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not can_be_split(func._schema.name):
            return call_operator(func, args, kwargs)
        if self._count == len(self._along):
            raise ApplyFailed(
                f"{func} draws random numbers, but did not in the first batch, so a part cannot get "
                "its own. Take micro_batch out of the plan."
            )
        along = self._along[self._count]
        self._count += 1
        shared = along.dim == SHARED
        return func(*args, **kwargs) if shared else self._drawn(func, along, args, kwargs)

    def _drawn(self, func: Any, along: SampleLayout, args: Any, kwargs: Any) -> Any:
        rows, name, dim = self._rows, func._schema.name, along.dim
        if name in _OF_SIZE:
            size = rows.whole_shape(tuple(args[0]), dim)
            return rows.mine(func(size, *args[1:], **kwargs), dim).clone()
        given, *rest = args
        whole = rows.room(given, along)
        if name in _INTO_SELF:
            return given.copy_(rows.mine(func(whole, *rest, **kwargs), dim))
        if name in _LIKE:
            return rows.mine(func(whole, *rest, **kwargs), dim).clone()
        if rest[1] is False:
            return func(*args, **kwargs)
        kept = rows.mine(func(whole.fill_(1), *rest, **kwargs)[1], dim).clone()
        scale = 1 / (1 - rest[0]) if rest[0] < 1 else 0.0
        return given * kept * scale, kept


def _states() -> list[torch.Tensor]:
    begun = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    return [torch.get_rng_state(), *(torch.cuda.get_rng_state_all() if begun else ())]


def can_be_split(name: str) -> bool:
    """Return True if a part's numbers are known to be a slice of all samples' numbers."""
    return name in _INTO_SELF or name in _LIKE or name in _OF_SIZE or name == _DROPOUT
