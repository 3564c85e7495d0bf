"""A script's own random generators are found wherever its variables lead."""

from __future__ import annotations

import functools
import random
import runpy
import sys
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, RandomSampler, Subset, TensorDataset

from torchtrim.dispatch.places import Places
from torchtrim.evidence.generators import Generators, state_of

HERE = str(Path(__file__).parent)
KINDS: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    "torch": (lambda: torch.Generator().manual_seed(7), lambda own: torch.rand(1, generator=own)),
    "python": (lambda: random.Random(7), lambda own: own.random()),
    "numpy": (lambda: numpy.random.default_rng(7), lambda own: own.random()),
    "legacy numpy": (lambda: numpy.random.RandomState(7), lambda own: own.rand()),
    "bits": (lambda: numpy.random.MT19937(7), lambda own: own.random_raw()),
}


class Holder:
    """Holds a generator as an object of the script's does."""

    def __init__(self, own: Any) -> None:
        self.own = own

    def method(self) -> None: ...


class Slotted:
    """Holds it in a slot."""

    __slots__ = ("own",)

    def __init__(self, own: Any) -> None:
        self.own = own


class Rows(Dataset[int]):
    """A data set that draws."""

    def __init__(self, own: Any) -> None:
        self.own = own


class Layer(nn.Module):
    """A layer that draws, by an object that it holds."""

    def __init__(self, own: Any) -> None:
        super().__init__()
        self.inner = Holder(own)


def closed(own: Any) -> Callable[[], Any]:
    return lambda: own


def batches(own: Any) -> Iterator[int]:
    while True:
        yield len(str(own))


def started(own: Any) -> Iterator[int]:
    iterator = batches(own)
    next(iterator)
    return iterator


WAYS: dict[str, Callable[[Any], Any]] = {
    "itself": lambda own: own,
    "list": lambda own: [0, own],
    "dict": lambda own: {"a": {1: (own,)}},
    "set": lambda own: {own},
    "deque": lambda own: deque([own]),
    "object": Holder,
    "slots": Slotted,
    "namespace": lambda own: SimpleNamespace(own=own),
    "method": lambda own: Holder(own).method,
    "closure": closed,
    "partial": lambda own: functools.partial(print, own),
    "suspended": started,
    "data set": lambda own: DataLoader(Subset(Rows(own), [0])),
    "module": lambda own: nn.Sequential(nn.ReLU(), Layer(own)),
}


ROWS = TensorDataset(torch.arange(4))


def shuffled(own: torch.Generator) -> DataLoader[Any]:
    return DataLoader(ROWS, shuffle=True, generator=own)


def held(way: Callable[[Any], Any], own: Any) -> tuple[Any, Callable[[], Any]]:
    """What holds a generator that no other variable does, and what draws from it."""
    return way(own), getattr(own, "random", own.seed)


def looks(value: Any, between: Callable[[], Any], found: Generators | None = None) -> Any:
    """What is found before and after `between`, of a variable that is there a look before."""
    found = found or Generators(Places(HERE))
    list(found.states(sys._getframe(0)))
    before = dict(found.states(sys._getframe(0)))
    between()
    after = dict(found.states(sys._getframe(0)))
    return {name for name in before if name.startswith("looks.") and before[name] != after[name]}


@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_is_seen_when_it_draws_and_only_then(kind: str) -> None:
    make, draw = KINDS[kind]
    own = make()
    assert looks(own, lambda: draw(own)) == {"looks.value"}
    assert not looks(own, lambda: None)


@pytest.mark.parametrize("way", WAYS)
def test_it_is_found_wherever_a_variable_leads(way: str) -> None:
    value, draw = held(WAYS[way], random.Random(7))
    assert len(looks(value, draw)) == 1


@pytest.mark.parametrize("way", [lambda own: RandomSampler(ROWS, generator=own), shuffled])
def test_loaders_and_samplers_hold_generators(way: Callable[[Any], Any]) -> None:
    value, draw = held(way, torch.Generator().manual_seed(1))
    assert len(looks(value, draw)) == 1


STREAM = """
import numpy

def stream():
    rng = numpy.random.default_rng(1)
    while True:
        yield int(rng.integers(9))
"""


def test_a_loop_holds_what_no_variable_does(tmp_path: Path) -> None:
    (tmp_path / "stream.py").write_text(STREAM)
    found = Generators(Places(str(tmp_path)))
    seen = []
    for number, _ in enumerate(runpy.run_path(str(tmp_path / "stream.py"))["stream"]()):
        seen.append(dict(found.states(sys._getframe(0))))
        if number == 2:
            break
    assert seen[1]["stream.rng"] != seen[2]["stream.rng"]


def test_what_each_step_makes_anew_does_not_count() -> None:
    found = Generators(Places(HERE))
    for number in range(3):
        own = random.Random(number)
        assert not [name for name, _ in found.states(sys._getframe(0)) if name.endswith(".own")]
    assert own


def test_a_look_draws_nothing_and_calls_no_property() -> None:
    class Wary:
        def __init__(self) -> None:
            self.rng = random.Random(1)

        @property
        def other(self) -> None:
            raise AssertionError

        def __getattr__(self, name: str) -> None:
            raise AssertionError(name)

    assert looks(Wary(), lambda: None) == set()


def test_a_state_is_told_in_full_however_arrays_are_printed() -> None:
    own = numpy.random.RandomState(1)
    with numpy.printoptions(threshold=5, edgeitems=1):
        before = state_of(own)
        state = own.get_state(legacy=False)
        state["state"]["key"][300] ^= 1
        own.set_state(state)
        assert state_of(own) != before
    assert state_of(3) is None
