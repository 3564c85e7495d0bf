"""Blocks that append to lists: a rerun takes off what it appends, where it does nothing else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from torchtrim.capture.code.side_effects import SideEffects
from torchtrim.errors import ApplyFailed
from torchtrim.executor.registry import technique
from torchtrim.records.plan import Technique

SEEN: list[Any] = []
PLAN = Technique(name="recompute", where=("Net",))
LONG = 3000
"""Items: more than are copied before each call."""


class Block(nn.Module):
    def __init__(self) -> None:
        torch.manual_seed(0)
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.seen: list[Any] = []

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(x).tanh().sin()
        self.note(x)
        return x

    def note(self, x: Tensor) -> None:
        raise NotImplementedError

    def listed(self) -> list[Any]:
        return self.seen


class ToItsOwn(Block):
    def note(self, x: Tensor) -> None:
        self.seen.append(x)
        self.seen.append(len(x))


class ToOneOfTheFile(Block):
    def note(self, x: Tensor) -> None:
        SEEN.append(x)

    def listed(self) -> list[Any]:
        return SEEN


class ToADefault(Block):
    def note(self, x: Tensor, seen: list[Any] = []) -> None:  # noqa: B006
        seen.append(x)

    def listed(self) -> list[Any]:
        found: list[Any] = (ToADefault.note.__defaults__ or ())[0]
        return found


class Last(Block):
    def note(self, x: Tensor) -> None:
        self.seen.append(self.seen[-1] if self.seen else x)


class Length(Block):
    def note(self, x: Tensor) -> None:
        self.seen.append(len(self.seen))


class Named(Block):
    def note(self, x: Tensor) -> None:
        seen = self.seen
        seen.append(len(seen))


class ByName(Block):
    def note(self, x: Tensor) -> None:
        self.seen.append(len(getattr(self, "seen")))  # noqa: B009


class ByProperty(Block):
    @property
    def count(self) -> int:
        return len(self.seen)

    def note(self, x: Tensor) -> None:
        self.seen.append(self.count)


class Popping(Block):
    def note(self, x: Tensor) -> None:
        self.seen.append(x)
        self.seen.pop(0)


class Extending(Block):
    def note(self, x: Tensor) -> None:
        self.seen.extend([x, x])


class Given(Block):
    def note(self, x: Tensor) -> None:
        self.take(x, self.seen)

    def take(self, x: Tensor, seen: list[Any] = []) -> None:  # noqa: B006
        seen.append(x)


class Inner(nn.Module):
    def forward(self, x: Tensor, seen: list[Any] = []) -> None:  # noqa: B006
        seen.append(x)


class GivenToAModule(Block):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Inner()

    def note(self, x: Tensor) -> None:
        self.inner(x, self.seen)


class Fewest(list[Any]):
    def append(self, one: Any) -> None:
        super().append(one)
        del self[:-2]


class ToOneOfItsClass(Block):
    def __init__(self) -> None:
        super().__init__()
        self.seen = Fewest()

    def note(self, x: Tensor) -> None:
        self.seen.append(x)


APPENDING = [ToItsOwn, ToOneOfTheFile, ToADefault]
READING = [
    Last,
    Length,
    Named,
    ByName,
    ByProperty,
    Popping,
    Extending,
    ToOneOfItsClass,
    Given,
    GivenToAModule,
]


def step(block: Block, between: Callable[[Block], None], planned: bool) -> tuple[Any, ...]:
    """Return the gradients of a step, and what the list holds after it."""
    del block.listed()[:]
    block.listed().extend(range(LONG))
    x = torch.ones(4, 8)
    handle = technique("recompute").apply({"Net": block}, PLAN)
    if not planned:
        handle.revert()
    y = block(x)
    between(block)
    y.sum().backward()
    handle.revert()
    shown = [one.tolist() if isinstance(one, Tensor) else one for one in block.listed()]
    return shown, *(one.grad.tolist() for one in block.parameters() if one.grad is not None)


def nothing(block: Block) -> None: ...


def empties(block: Block) -> None:
    block.listed().clear()


def adds(block: Block) -> None:
    block.listed().append("later")


def replaces(block: Block) -> None:
    block.seen = ["new"]


@pytest.mark.parametrize("kind", APPENDING)
@pytest.mark.parametrize("between", [nothing, empties, adds, replaces])
def test_a_rerun_takes_off_what_it_appends(
    kind: type[Block], between: Callable[[Block], None]
) -> None:
    assert step(kind(), between, True) == step(kind(), between, False)


@pytest.mark.parametrize("kind", APPENDING)
def test_what_is_only_appended_to_grows(kind: type[Block]) -> None:
    block = kind()
    effects = SideEffects([block])
    assert effects.writes
    assert not effects.lasting
    assert [one is block.listed() for one in effects.grown] == [True]


@pytest.mark.parametrize("kind", READING)
def test_lists_that_the_block_reads_or_changes_otherwise_are_refused(kind: type[Block]) -> None:
    block = kind()
    assert not SideEffects([block]).grown
    with pytest.raises(ApplyFailed, match="cannot run a second time"):
        technique("recompute").apply({"Net": block}, PLAN)


def test_parts_of_a_batch_would_append_once_each() -> None:
    parts = Technique(name="micro_batch", where=("Net",), options={"parts": 2})
    with pytest.raises(ApplyFailed, match=r"calls `self\.seen\.append`"):
        technique("micro_batch").apply({"Net": ToItsOwn()}, parts)
