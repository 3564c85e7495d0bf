"""What blocks read in objects and containers that the program changes between forward and backward."""

from __future__ import annotations

import array
import collections
import contextvars
import dataclasses
import functools
import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from torchtrim.capture.code.contents import contents
from torchtrim.executor.registry import technique
from torchtrim.records.plan import Technique


class WithDefault:
    factor = 1.0


@dataclasses.dataclass(slots=True)
class Slots:
    factor: float = 1.0


class Computed:
    """An object that reads its number in a property, a descriptor and an operator."""

    def __init__(self) -> None:
        self._number = 1.0
        self.data = {"factor": 1.0, "other": 1.0}

    @property
    def factor(self) -> float:
        return self._number

    def __getitem__(self, name: str) -> float:
        return self.data[name]

    def __getattr__(self, name: str) -> float:
        return vars(self)["data"][name]


class ByDescriptor:
    class Factor:
        def __get__(self, of: Any, kind: Any = None) -> float:
            number: float = vars(of)["_number"]
            return number

    factor = Factor()

    def __init__(self) -> None:
        self._number = 1.0


class AttributeDict(dict[str, Any]):
    def __getattr__(self, name: str) -> Any:
        return self[name]


class Kind(NamedTuple):
    """Something that holds a number: how it is made, read and changed."""

    make: Callable[[], Any]
    read: Callable[[Any], Any]
    change: Callable[[Any], Any]


def sets(name: str) -> Callable[[Any], None]:
    return lambda held: setattr(held, name, 2.0)


def local() -> Any:
    held = threading.local()
    held.factor = 1.0
    return held


def variable() -> Any:
    held = contextvars.ContextVar("held", default=1.0)
    held.set(1.0)
    return held


def item(held: Any) -> None:
    held["factor"] = 2.0


def first(held: Any) -> None:
    held[0] = 2


ONE = {"factor": 1.0}
KINDS = {
    "class": Kind(WithDefault, lambda held: held.factor, sets("factor")),
    "slots": Kind(Slots, lambda held: held.factor, sets("factor")),
    "property": Kind(Computed, lambda held: held.factor, sets("_number")),
    "operator": Kind(Computed, lambda held: held["factor"], lambda held: item(held.data)),
    "any name": Kind(Computed, lambda held: held.other, lambda held: held.data.update(other=2.0)),
    "descriptor": Kind(ByDescriptor, lambda held: held.factor, sets("_number")),
    "new": Kind(SimpleNamespace, lambda held: getattr(held, "factor", 1.0), sets("factor")),
    "asked": Kind(SimpleNamespace, lambda held: 1.0 + hasattr(held, "factor"), sets("factor")),
    "vars": Kind(WithDefault, lambda held: len(vars(held)) + 1.0, sets("factor")),
    "local": Kind(local, lambda held: held.factor, sets("factor")),
    "variable": Kind(variable, lambda held: held.get(), lambda held: held.set(2.0)),
    "numpy": Kind(lambda: np.ones(3), lambda held: float(held[0]), first),
    "scalar": Kind(lambda: np.array(1.0), lambda held: held.item(), lambda held: held.fill(2)),
    "array": Kind(lambda: array.array("d", [1.0]), lambda held: held[0], first),
    "bytes": Kind(lambda: bytearray(b"1"), lambda held: float(held[0]), first),
    "set": Kind(set, lambda held: len(held) + 1.0, lambda held: held.add(1)),
    "counter": Kind(
        lambda: collections.Counter("a"), lambda held: held["a"] * 1.0, lambda held: held.update("a")
    ),
    "default": Kind(lambda: collections.defaultdict(float, ONE), lambda held: held["factor"], item),
    "ordered": Kind(lambda: collections.OrderedDict(ONE), lambda held: held["factor"], item),
    "user": Kind(lambda: collections.UserDict(ONE), lambda held: held["factor"], item),
    "own dict": Kind(lambda: AttributeDict(ONE), lambda held: held.factor, item),
    "partial": Kind(
        lambda: functools.partial(dict.get, dict(ONE), "factor"),
        lambda held: held(),
        lambda held: item(held.args[0]),
    ),
    "listed": Kind(
        lambda: [SimpleNamespace(factor=1.0)],
        lambda held: sum(one.factor for one in held),
        lambda held: sets("factor")(held[0]),
    ),
    "many": Kind(lambda: [1.0] * 1000, lambda held: held[0], first),
}  # fmt: skip


class Block(nn.Module):
    count = 0
    made = "first"

    def __init_subclass__(cls) -> None:
        cls.made = "another"

    def __init__(self, kind: Kind) -> None:
        torch.manual_seed(0)
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.held, self.read = kind.make(), kind.read

    def forward(self, x: Tensor) -> Tensor:
        return (self.linear(x).tanh() * self.read(self.held) * (type(self).count + 1)).sin()


def gradients(kind: Kind, *, planned: bool) -> list[Tensor]:
    block, found = Block(kind), []
    if planned:
        plan = Technique(name="recompute", where=("Sequential.0",), options={})
        technique("recompute").apply({"Sequential": nn.Sequential(block)}, plan)
    for step in range(4):
        block.zero_grad()
        loss = block(torch.ones(4, 8)).sum()
        if step == 2:
            kind.change(block.held)
        loss.backward()
        assert block.linear.weight.grad is not None
        found.append(block.linear.weight.grad.clone())
    assert not torch.equal(found[2], found[3])
    return found


@pytest.mark.parametrize("name", KINDS)
def test_a_rerun_reads_what_forward_read(name: str) -> None:
    both = (gradients(KINDS[name], planned=planned) for planned in (False, True))
    assert all(map(torch.equal, *both))


@pytest.mark.parametrize("name", KINDS)
def test_what_is_put_back_and_forth_is_as_it_was(name: str) -> None:
    kind = KINDS[name]
    held = kind.make()
    places = list(contents([("held", held)], None))
    before = kind.read(held)
    kind.change(held)
    after = kind.read(held)
    now = [(place, place.read()) for place, _ in places]
    assert not all(
        place.same(then, value) for (place, then), (_, value) in zip(places, now, strict=True)
    )
    for place, then in places:
        place.write(then)
    assert kind.read(held) == before
    for place, value in now:
        place.write(value)
    assert kind.read(held) == after


class Reversed(list[float]):
    """A list that shows its items from the end."""

    def __iter__(self) -> Iterator[float]:
        return reversed(self)


class Unbound:
    """A proxy without an object."""

    @property
    def __dict__(self) -> dict[str, Any]:  # type: ignore[override]
        raise RuntimeError("outside of a request")


def test_a_subclass_is_read_and_written_by_its_base() -> None:
    held = Reversed([1.0, 2.0])
    ((place, then),) = contents([("held", held)], None)
    held.append(3.0)
    place.write(then)
    assert [held[0], held[1], len(held)] == [1.0, 2.0, 2]


def test_an_object_that_shows_nothing_holds_nothing() -> None:
    ((place, then),) = contents([("held", Unbound())], None)
    assert place.same(then, place.read())


def test_what_is_set_on_the_class_of_a_planned_block_is_set_for_all() -> None:
    """A planned block has a class of its own."""
    block, other = (Block(KINDS["class"]) for _ in range(2))
    plan = Technique(name="recompute", where=("Sequential.0",), options={})
    technique("recompute").apply({"Sequential": nn.Sequential(block, other)}, plan)
    type(block).count = 3
    try:
        assert (Block.count, other.count, block.count) == (3, 3, 3)
    finally:
        Block.count = 0


def test_a_forward_that_a_library_wraps_in_the_class_of_a_planned_block_is_called_once() -> None:
    """transformers does so for its own checkpoints."""
    block, calls = Block(KINDS["class"]), []
    plan = Technique(name="recompute", where=("Sequential.0",), options={})
    technique("recompute").apply({"Sequential": nn.Sequential(block)}, plan)
    kind: Any = type(block)
    assert kind.made == "another"
    assert Block.made == "first"
    forward = kind.forward

    def wrapped(*args: Any) -> Any:
        calls.append(args)
        return forward(*args)

    kind.forward = wrapped
    block(torch.ones(4, 8)).sum().backward()
    assert len(calls) == 1
    assert Block.forward is not wrapped
