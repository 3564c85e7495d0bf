"""A block runs again as a whole: its own exception handlers see what they saw at first."""

from __future__ import annotations

import contextlib
import copy
import gc
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from steps import squared
from torchtrim.records.plan import Technique
from torchtrim.techniques.recompute.technique import TECHNIQUE


class Pair(nn.Module):
    """Two linear layers; the forwards below differ in what stands around them."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(16, 16), nn.Linear(16, 16)
        self.seen = 0

    def inner(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.b(torch.relu(self.a(x)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x)


class Wraps(Pair):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        try:
            return self.inner(x)
        except Exception as error:
            raise RuntimeError("block failed") from error


class Counts(Pair):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        try:
            return self.inner(x)
        finally:
            self.seen += 1


class FallsBack(Pair):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        try:
            return self.inner(x)
        except Exception:
            self.seen += 100
            return 2 * self.a(x)


@contextlib.contextmanager
def explained() -> Iterator[None]:
    try:
        yield
    except Exception as error:
        raise RuntimeError("explained") from error


class InContext(Pair):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with explained():
            return self.inner(x)


class Generates(Pair):
    def parts(self, x: torch.Tensor) -> Iterator[torch.Tensor]:
        try:
            yield torch.relu(self.a(x))
            yield self.b(x)
        except Exception:
            self.seen += 100
            yield x

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return sum(self.parts(x), x)


BLOCKS = (Pair, Wraps, Counts, FallsBack, InContext, Generates)


class Products(TorchDispatchMode):
    """Counts the layers that run."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.aten.addmm.default
        return func(*args, **(kwargs or {}))


def apply(model: nn.Module, *where: str) -> None:
    TECHNIQUE.apply({"Sequential": model}, Technique(name="recompute", where=where))


def left(model: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    """All that two steps leave, and how many layers ran in the last backward."""
    found = []
    for _ in range(2):
        model.zero_grad()
        loss = squared(model, x)
        with Products() as products:
            loss.backward()
        found += [
            loss.detach(),
            *(p.grad.clone() for p in model.parameters() if p.grad is not None),
        ]
    found += [torch.tensor([module.seen for module in model.modules() if hasattr(module, "seen")])]
    return [*found, torch.tensor(products.count)]


def compared(make: Callable[[], Pair], *where: str) -> int:
    """Return how many layers ran again; all else must be equal, bit for bit."""
    torch.manual_seed(0)
    model = nn.Sequential(make(), nn.Sequential(make(), make()))
    twin, x = copy.deepcopy(model), torch.randn(4, 16)
    apply(model, *where)
    *ours, again = left(model, x)
    *theirs, none = left(twin, x)
    assert all(map(torch.equal, ours, theirs))
    assert none == 0
    return int(again)


@pytest.mark.parametrize("make", BLOCKS)
def test_a_block_runs_to_its_end(make: type[Pair]) -> None:
    assert compared(make, "Sequential.0") == 2


@pytest.mark.parametrize("make", BLOCKS)
def test_blocks_within_blocks(make: type[Pair]) -> None:
    compared(make, "Sequential.1", "Sequential.1.0", "Sequential.1.1", "Sequential.0")
    compared(make, "Sequential", "Sequential.1", "Sequential.1.0")


def test_an_error_of_the_block_is_its_own() -> None:
    class Fails(Wraps):
        def inner(self, x: torch.Tensor) -> torch.Tensor:
            raise ValueError("broken")

    model = nn.Sequential(Fails())
    apply(model, "Sequential.0")
    with pytest.raises(RuntimeError, match="block failed") as caught:
        squared(model, torch.randn(4, 16))
    assert isinstance(caught.value.__cause__, ValueError)


def test_a_graph_that_is_retained_has_more_than_one_backward() -> None:
    torch.manual_seed(0)
    for make in (Pair, Wraps):
        model = nn.Sequential(make(), make())
        twin, x = copy.deepcopy(model), torch.randn(4, 16)
        apply(model, "Sequential.0", "Sequential.1")
        for one in (model, twin):
            loss = squared(one, x)
            loss.backward(retain_graph=True)
            loss.backward()
        assert all(
            torch.equal(p.grad, q.grad)
            for p, q in zip(model.parameters(), twin.parameters(), strict=True)
        )


def test_a_backward_inside_the_block() -> None:
    """What is saved after it is more than what the first run kept count of."""

    class Inside(Wraps):
        def inner(self, x: torch.Tensor) -> torch.Tensor:
            with torch.enable_grad():
                y = x.detach().requires_grad_()
                (slope,) = torch.autograd.grad(torch.tanh(self.a(y)).sum(), y)
            return self.b(x * slope)

    for make in (Inside, type("Plain", (Inside,), {"forward": Pair.forward})):
        compared(make, "Sequential.0", "Sequential.1.0")


def test_nothing_of_the_step_is_left() -> None:
    """No cycle keeps what the block was called with until the collector comes."""
    model = nn.Sequential(Pair(), Wraps())
    apply(model, "Sequential.0", "Sequential.1")
    gc.collect()
    gc.disable()
    try:
        x = torch.randn(4, 16)
        watched = weakref.ref(x.untyped_storage())
        squared(model, x).backward()
        del x
        assert watched() is None
    finally:
        gc.enable()
