"""Calls that run more than once write to their arguments once, and each run is given the same."""

from __future__ import annotations

import array
import collections
import io
import itertools
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_sequence

from torchtrim.errors import ApplyFailed
from torchtrim.executor import arguments
from torchtrim.executor.arguments import GivenArguments, as_they_are, held, is_same
from torchtrim.executor.registry import technique
from torchtrim.records.plan import Technique


class Counts:
    def __init__(self) -> None:
        self.n = 0

    def add(self) -> int:
        self.n += 1
        return self.n

    def __next__(self) -> int:
        return self.add()


class Slots:
    __slots__ = ("n",)

    def __init__(self) -> None:
        self.n = 0

    def __call__(self) -> int:
        self.n += 1
        return self.n


class Around:
    def __init__(self, inner: Any) -> None:
        self.inner = inner


class Module(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.n = 0

    def forward(self) -> int:
        self.n += 1
        return self.n


def counter() -> Callable[[], int]:
    count = [0]

    def add() -> int:
        count[0] += 1
        return count[0]

    return add


def call(given: Any) -> int:
    return int(given())


def grown(given: Any) -> int:
    given.append(1)
    return len(given)


def first(given: Any) -> int:
    given[0] += 1
    return int(given[0])


def more(given: Any) -> int:
    given.add(len(given))
    return len(given)


KINDS: dict[str, tuple[Callable[[], Any], Callable[[Any], float]]] = {
    "object": (Counts, lambda given: given.add()),
    "slots": (Slots, call),
    "method": (lambda: Counts().add, call),
    "within": (lambda: [(Around(Counts()),)], lambda given: given[0][0].inner.add()),
    "list": (list, grown),
    "deque": (collections.deque, grown),
    "set": (set, more),
    "buffer": (lambda: bytearray(1), first),
    "array": (lambda: array.array("l", [0]), first),
    "numpy": (lambda: np.zeros(1), first),
    "user's iterator": (Counts, next),
    "torch's draws": (torch.Generator, lambda given: float(torch.rand(1, generator=given))),
    "numpy's draws": (lambda: np.random.default_rng(1), lambda given: float(given.random())),
    "a draw": (lambda: np.random.default_rng(1).random, lambda given: float(given())),
    "iterator": (lambda: itertools.count(1), next),
    "generator": (lambda: (i for i in range(100)), next),
    "iterator within": (lambda: Around(iter(range(100))), lambda given: int(next(given.inner))),
    "function": (counter, call),
    "module": (Module, call),
    "file": (io.StringIO, lambda given: given.write("x") and given.tell()),
}
ONCE = {"iterator", "generator", "iterator within", "function", "module", "file"}


class Net(nn.Module):
    """Multiplies with a number that writing to its argument gives."""

    def __init__(self, write: Callable[[Any], float]) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4))
        self.write = write

    def forward(self, x: torch.Tensor, given: Any) -> torch.Tensor:
        return self.layers(x) * (1 + self.write(given))


def trained(kind: str, planned: Technique | None) -> tuple[Any, ...]:
    torch.manual_seed(0)
    make, write = KINDS[kind]
    net, given = Net(write).double(), make()
    if planned is not None:
        technique(planned.name).apply({"Net": net}, planned)
    for _ in range(2):
        net(torch.ones(4, 4, dtype=torch.double), given).sum().backward()
    gradients = [parameter.grad for parameter in net.parameters()]
    return write(given), gradients


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["recompute", "micro_batch"])
def test_what_a_call_writes_to_its_arguments_it_writes_once(name: str, kind: str) -> None:
    options = {"parts": 2} if name == "micro_batch" else {}
    planned = Technique(name=name, where=("Net",), options=options)
    if name == "micro_batch" and kind in ONCE:
        with pytest.raises(ApplyFailed, match="cannot run in parts"):
            trained(kind, planned)
        return
    expected, gradients = trained(kind, None)
    found, graded = trained(kind, planned)
    assert found == expected
    torch.testing.assert_close(graded, gradients, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("kind", KINDS)
def test_a_call_that_may_run_only_once_is_one_given_what_has_no_copy(kind: str) -> None:
    make, _ = KINDS[kind]
    assert bool(GivenArguments((make(),)).why_once) == (kind in ONCE)


def test_sentinels_modules_of_the_block_and_plain_functions_are_given_as_they_are() -> None:
    sentinel, module, plain = object(), nn.Linear(1, 1), np.sum
    call = (sentinel, module, plain, torch.add, torch.float32, nn.functional.relu, lambda x: x + 1)
    given = GivenArguments(call, {id(module)})
    assert given.why_once == ""
    assert all(a is b for a, b in zip(call, given.again(), strict=True))


def test_a_packed_sequence_is_given_to_each_run() -> None:
    """It is of a subclass of a named tuple, so it could have attributes."""
    packed = pack_sequence([torch.ones(3), torch.ones(2)])
    given = GivenArguments((packed,))
    assert given.why_once == ""
    assert given.again()[0] is packed
    packed.count = 0
    assert "PackedSequence" in GivenArguments((packed,)).why_once


@pytest.mark.parametrize(
    "kind", ["object", "slots", "within", "list", "deque", "set", "array", "numpy"]
)
def test_a_write_is_seen_and_leaves_the_copy(kind: str) -> None:
    make, write = KINDS[kind]
    given = make()
    copied, before = as_they_are(given), held(given)
    untouched = held(copied)
    write(given)
    assert not is_same(before, held(given))
    assert is_same(untouched, held(copied))


def test_functions_among_the_arguments_are_read_once_and_hold_no_tensor() -> None:
    def about(tensor: torch.Tensor, scale: int) -> GivenArguments:
        return GivenArguments((lambda: tensor * scale,))

    about(torch.ones(3), 1)
    known = len(arguments._KNOWN)
    tensor = torch.ones(3)
    gone = weakref.ref(tensor)
    about(tensor, 2)
    assert len(arguments._KNOWN) == known
    del tensor
    assert gone() is None
