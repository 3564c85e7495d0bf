"""Blocks that read what the program replaces: random generators, and values outside of their modules."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from torchtrim.errors import ApplyFailed
from torchtrim.executor.registry import technique
from torchtrim.records.plan import Technique

GLOBAL: Any = None
FIRST, OTHER = 1, 2


def of_torch(seed: int) -> Any:
    return torch.Generator().manual_seed(seed)


def a_tensor(seed: int) -> Any:
    return torch.full((8,), float(seed))


def with_noise(given: Any, x: Tensor) -> Tensor:
    if isinstance(given, (torch.Generator, random.Random)):
        drawn = (
            given.random() if isinstance(given, random.Random) else torch.rand(8, generator=given)
        )
        return x * drawn
    return x * given


class Block(nn.Module):
    of_class: Any = None

    def __init__(self, make: Callable[[int], Any]) -> None:
        torch.manual_seed(0)
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.own, self.held = make(FIRST), SimpleNamespace(inner=make(FIRST))
        self.several, self.listed = {"a": {"b": make(FIRST)}}, [make(FIRST)]
        self.queue = deque([make(FIRST)])

    def forward(self, x: Tensor) -> Tensor:
        return with_noise(self.read(), self.linear(x).tanh()).sin()

    def read(self) -> Any:
        raise NotImplementedError


class OfAttribute(Block):
    def read(self) -> Any:
        return self.own

    def replace(self, new: Any) -> None:
        self.own = new


class OfObject(Block):
    def read(self) -> Any:
        return self.held.inner

    def replace(self, new: Any) -> None:
        self.held.inner = new


class OfList(Block):
    def read(self) -> Any:
        return self.listed[0]

    def replace(self, new: Any) -> None:
        self.listed[0] = new


class OfFile(Block):
    def __init__(self, make: Callable[[int], Any]) -> None:
        super().__init__(make)
        self.replace(make(FIRST))

    def read(self) -> Any:
        return GLOBAL

    def replace(self, new: Any) -> None:
        global GLOBAL
        GLOBAL = new


def closing_over(make: Callable[[int], Any]) -> Any:
    value = make(FIRST)

    class OfClosure(Block):
        def read(self) -> Any:
            return value

        def replace(self, new: Any) -> None:
            nonlocal value
            value = new

    return OfClosure(make)


class OfNested(Block):
    def read(self) -> Any:
        return self.several["a"]["b"]

    def replace(self, new: Any) -> None:
        self.several["a"]["b"] = new


class OfDeque(Block):
    def read(self) -> Any:
        return self.queue[0]

    def replace(self, new: Any) -> None:
        self.queue[0] = new


class OfClass(Block):
    def __init__(self, make: Callable[[int], Any]) -> None:
        super().__init__(make)
        self.replace(make(FIRST))

    def read(self) -> Any:
        return self.of_class

    def replace(self, new: Any) -> None:
        OfClass.of_class = new


ALL = (OfAttribute, OfObject, OfList, OfFile, closing_over)
VALUES = (*ALL, OfNested, OfDeque, OfClass)


def planned(block: nn.Module) -> None:
    plan = Technique(name="recompute", where=("Sequential.0",), options={})
    technique("recompute").apply({"Sequential": nn.Sequential(block)}, plan)


def gradients(block: Any, make: Callable[[int], Any], *, between: bool) -> list[Tensor]:
    """The gradients of four steps. What the block reads is replaced in the third.

    `between`: after its forward.
    """
    x, found = torch.ones(4, 8), []
    for step in range(4):
        if step == 2 and not between:
            block.replace(make(OTHER))
        block.zero_grad()
        loss = block(x).sum()
        if step == 2 and between:
            block.replace(make(OTHER))
        loss.backward()
        found.append(block.linear.weight.grad.clone())
    return found


def assert_same(kind: Callable[..., Any], make: Callable[[int], Any], *, between: bool) -> None:
    expected = gradients(kind(make), make, between=between)
    block = kind(make)
    planned(block)
    assert all(map(torch.equal, expected, gradients(block, make, between=between)))


@pytest.mark.parametrize("make", [of_torch, random.Random], ids=["torch", "Python"])
@pytest.mark.parametrize("kind", ALL, ids=lambda kind: kind.__name__)
def test_another_generator_is_rewound_too(make: Any, kind: Any) -> None:
    assert_same(kind, make, between=False)


@pytest.mark.parametrize("make", [of_torch, float, a_tensor], ids=["generator", "number", "tensor"])
@pytest.mark.parametrize("kind", VALUES, ids=lambda kind: kind.__name__)
def test_a_rerun_reads_what_forward_read(make: Any, kind: Any) -> None:
    if make is of_torch and kind not in ALL:
        pytest.skip("generators are not looked for there")
    assert_same(kind, make, between=True)


@pytest.mark.parametrize("kind", VALUES, ids=lambda kind: kind.__name__)
def test_a_tensor_that_is_written_to_in_between_stops_the_run(kind: Any) -> None:
    block = kind(a_tensor)
    planned(block)
    loss = block(torch.ones(4, 8)).sum()
    block.read().mul_(2)
    with pytest.raises(ApplyFailed, match="written to between its forward and its backward"):
        loss.backward()


def test_what_is_read_later_is_as_the_program_left_it() -> None:
    block = closing_over(float)
    planned(block)
    loss = block(torch.ones(4, 8)).sum()
    block.replace(3.0)
    loss.backward()
    assert block.read() == 3.0


CACHE: dict[str, Tensor] = {}


class Cached(Block):
    """A block that fills a cache of its file once, as tables of positions are."""

    def forward(self, x: Tensor) -> Tensor:
        if "table" not in CACHE:
            CACHE["table"] = self.table()
        return (self.linear(x) * CACHE["table"]).sin()

    def table(self) -> Tensor:
        return torch.arange(8.0)


def test_a_cache_that_forward_filled_is_not_filled_again(monkeypatch: pytest.MonkeyPatch) -> None:
    block = Cached(float)
    planned(block)
    loss = block(torch.ones(4, 8)).sum()
    monkeypatch.delattr(Cached, "table")
    loss.backward()
    assert [*CACHE] == ["table"]


SETTINGS: dict[str, float] = {}


class Told(Block):
    """A block that reads what may be missing, in a dict and in its class."""

    later: float

    def forward(self, x: Tensor) -> Tensor:
        factor = SETTINGS.get("factor", 1.0) * getattr(type(self), "later", 1.0)
        return (self.linear(x) * factor).sin()

    def replace(self, new: Any) -> None:
        self.clear()
        if new == OTHER:
            SETTINGS["factor"] = type(self).later = new

    @staticmethod
    def clear() -> None:
        SETTINGS.clear()
        if "later" in vars(Told):
            del Told.later


@pytest.mark.parametrize(("first", "then"), [(FIRST, OTHER), (OTHER, FIRST)])
def test_what_was_missing_in_forward_is_missing_in_the_rerun(first: int, then: int) -> None:
    found = []
    for is_planned in (False, True):
        block = Told(float)
        block.replace(first)
        if is_planned:
            planned(block)
        found.append(gradients(block, lambda _: then, between=True))
        assert ("factor" in SETTINGS, "later" in vars(Told)) == ((then == OTHER,) * 2)
    Told.clear()
    assert all(map(torch.equal, *found))


class Counting(Block):
    """A block that does something else at every second call, as a list tells it, written out of sight."""

    def forward(self, x: Tensor) -> Tensor:
        eval("self.listed.append(1.0)")
        return (self.linear(x) * len(self.listed)).sin()


@pytest.mark.parametrize("clears", [False, True])
def test_what_is_appended_out_of_sight_is_appended_once(clears: bool) -> None:
    """`clears`: the program empties the list after each forward."""
    plain, block = Counting(float), Counting(float)
    planned(block)
    for _ in range(4):
        for one in (plain, block):
            loss = one(torch.ones(4, 8)).sum()
            if clears:
                one.listed.clear()
            loss.backward()
        assert plain.linear.weight.grad is not None
        assert block.linear.weight.grad is not None
        assert torch.equal(plain.linear.weight.grad, block.linear.weight.grad)
        assert block.listed == plain.listed
