"""Ranges of a Sequential with custom execution. Several techniques may use ranges of one Sequential."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from torch import nn

from torchtrim.errors import ApplyFailed
from torchtrim.executor.notices import say_once
from torchtrim.executor.swap import Swapped, is_of_another

_TABLE = "_torchtrim_ranges"
Run = Callable[..., Any]


class Range(NamedTuple):
    """Children `first <= i < last`. `run(forward, value)` runs them; `forward` applies them in order.

    `where` names them in messages.
    """

    first: int
    last: int
    run: Run
    where: str = ""


class Ranges:
    """One technique's ranges of a Sequential. Raises `ApplyFailed` if they overlap other ranges."""

    def __init__(self, chain: nn.Sequential, ranges: Sequence[Range]) -> None:
        known = getattr(_owner(chain), _TABLE, None)
        self._table = known if isinstance(known, _Table) and known.ranges else _Table(chain)
        children = list(chain)
        self._own = tuple(_Placed(one, children[one.first : one.last]) for one in ranges)
        self._table.add(self._own)

    def revert(self) -> None:
        """Remove the ranges."""
        self._table.remove(self._own)


class _Placed(NamedTuple):
    """A range, and the modules that it was made for."""

    range: Range
    modules: list[nn.Module]

    @property
    def first(self) -> int:
        return self.range.first


class _Table:
    """All ranges of a Sequential, and its forward."""

    def __init__(self, chain: nn.Sequential) -> None:
        self._chain = chain
        self.ranges: list[_Placed] = []
        self._swapped: Swapped | None = None

    def add(self, ranges: Sequence[_Placed]) -> None:
        every = sorted([*self.ranges, *ranges], key=lambda one: one.first)
        position = 0
        for (first, last, *_), _ in every:
            if not position <= first < last <= len(self._chain):
                raise ApplyFailed(
                    f"the range [{first}:{last}] overlaps another or leaves a Sequential of "
                    f"{len(self._chain)}."
                )
            position = last
        if self._swapped is None:
            self._swapped = Swapped(
                self._chain, lambda run: run if is_of_another(run, self._chain) else self.forward
            )
            setattr(_owner(self._chain), _TABLE, self)
        self.ranges = every

    def remove(self, ranges: Sequence[_Placed]) -> None:
        """Remove ranges. Restores the Sequential with the last of them."""
        self.ranges = [one for one in self.ranges if not any(one is own for own in ranges)]
        if not self.ranges and self._swapped is not None:
            self._swapped.revert()

    def forward(self, value: Any) -> Any:
        children = list(self._chain)
        position = 0
        for (first, last, run, where), modules in self.ranges:
            value = one_by_one(children[position:first], value)
            inner, position = children[first:last], max(position, min(last, len(children)))
            if len(inner) == len(modules) and all(map(operator.is_, inner, modules)):
                value = run(lambda value, inner=inner: one_by_one(inner, value), value)
            else:
                say_once(where, _OTHERS)
                value = one_by_one(inner, value)
        return one_by_one(children[position:], value)


_OTHERS = "its Sequential has other modules now, so they run without the plan, and its saving there is lost."


def one_by_one(modules: Sequence[nn.Module], value: Any) -> Any:
    """Apply the modules in order, like a Sequential."""
    for module in modules:
        value = module(value)
    return value


def _owner(chain: nn.Sequential) -> Any:
    """The object that holds the forward: the instance's own function, or its class."""
    return chain.__dict__.get("forward", type(chain))
