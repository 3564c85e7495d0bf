"""Attributes that a call reads, and those that it has set before it reads them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import torchtrim
from steps import squared
from torchtrim.capture.code.side_effects import SideEffects
from torchtrim.executor.registry import technique
from torchtrim.records.plan import Technique
from torchtrim.step.from_profile import step_of
from torchtrim.step.simulate import simulate


class Kept(nn.Module):
    """A layer that keeps its result."""

    def forward(self, x: Tensor) -> Tensor:
        self.kept = x * 2
        return x


class KeptAtTimes(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        if x.sum() < 0:
            return x
        self.kept = x * 2
        return x


class Outer(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.seen = inner, None


class After(Outer):
    def forward(self, x: Tensor) -> Tensor:
        self.inner(x)
        return self.inner.kept


class InOneStatement(Outer):
    def forward(self, x: Tensor) -> Tensor:
        made = self.inner(x)
        return (made, self.inner.kept)[1]


class Before(Outer):
    def forward(self, x: Tensor) -> Tensor:
        kept = getattr(self.inner, "kept", x) if x is None else self.inner.kept
        self.inner(x)
        return kept


class AtTimes(Outer):
    def forward(self, x: Tensor) -> Tensor:
        if x.sum() > 0:
            self.inner(x)
        return self.inner.kept


class ByChance(Outer):
    def forward(self, x: Tensor) -> Tensor:
        made = x.sum() > 0 and self.inner(x)
        return made + self.inner.kept


class OfAnother(Outer):
    def forward(self, x: Tensor) -> Tensor:
        Kept()(x)
        return self.inner.kept


class Own(Outer):
    def forward(self, x: Tensor) -> Tensor:
        self.kept = x
        return self.kept


class Added(Outer):
    def forward(self, x: Tensor) -> Tensor:
        self.kept += x
        return self.kept


@pytest.mark.parametrize(
    ("kind", "inner", "reads"),
    [
        (After, Kept, False),
        (InOneStatement, Kept, False),
        (Own, Kept, False),
        (After, KeptAtTimes, True),
        (Before, Kept, True),
        (AtTimes, Kept, True),
        (ByChance, Kept, True),
        (OfAnother, Kept, True),
        (Added, Kept, True),
    ],
)
def test_what_a_call_has_set_is_not_read_from_the_last(
    kind: type[Outer], inner: type[nn.Module], reads: bool
) -> None:
    model = kind(inner())
    model.inner(torch.ones(2))
    assert ("kept" in SideEffects([model]).reads) == reads


def test_a_forward_that_was_replaced_may_set_nothing() -> None:
    model = After(Kept())
    model.inner.forward = lambda x: x  # type: ignore[method-assign]
    assert "kept" in SideEffects([model]).reads


class Keeping(nn.Module):
    """A block whose result is an attribute of its layer."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Kept()
        self.linear = nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(x).tanh()
        self.inner(x)
        return self.inner.kept.sin()


class Averaging(Keeping):
    """A block that reads the result of its last call."""

    def forward(self, x: Tensor) -> Tensor:
        last = getattr(self.inner, "kept", None)
        x = self.linear(x).tanh()
        self.inner(x)
        return (self.inner.kept if last is None else last.detach() * self.inner.kept).sin()


WHERE = tuple(f"Sequential.{number}" for number in range(3))
PLAN = Technique(name="recompute", where=WHERE, options={})


@pytest.mark.parametrize("kind", [Keeping, Averaging])
def test_what_the_last_call_left_is_kept_for_a_rerun_that_reads_it(kind: type[nn.Module]) -> None:
    step = trained(kind)
    recorded, unit = step_of(torchtrim.record(step)), technique("recompute")
    options = [option for option in unit.options(recorded) if option.where in WHERE]
    edits = [edit for option in options if (edit := unit.edits(recorded, option)) is not None]
    unit.apply({"Sequential": step.model}, PLAN)
    step.step(0)
    predicted = simulate(recorded, edits).peak_bytes
    assert predicted == pytest.approx(torchtrim.record(step).peak_bytes, rel=0.001)


@pytest.mark.parametrize("kind", [Keeping, Averaging])
def test_a_rerun_reads_what_the_last_call_left(kind: type[nn.Module]) -> None:
    planned, plain = trained(kind), trained(kind)
    technique("recompute").apply({"Sequential": planned.model}, PLAN)
    for number in range(2, 5):
        planned.step(number)
        plain.step(number)
    pairs = zip(planned.model.parameters(), plain.model.parameters(), strict=True)
    assert all(torch.equal(one, other) for one, other in pairs)


def trained(kind: type[nn.Module]) -> torchtrim.TrainStep:
    torch.manual_seed(0)
    net = nn.Sequential(kind(), kind(), kind())
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)
    step = torchtrim.TrainStep(net, squared, optimizer, torch.randn(512, 64))
    for number in range(2):
        step.step(number)
    return step
