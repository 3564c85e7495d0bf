"""Names of compiled graphs and their values, in the program's precision and in float64."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch._dynamo
from torch import Tensor, fx, nn

from torchtrim.compiled.apply import Applied
from torchtrim.compiled.inductor import NotPlanned, dry
from torchtrim.compiled.joint import Joint, JointBuilder
from torchtrim.compiled.names import double_keys_of
from torchtrim.compiled.planning import named
from torchtrim.records.plan import CompiledGraph

Choose = Callable[[fx.Graph, Any, Callable[[], list[fx.Node]]], list[fx.Node]]


class Attending(nn.Module):
    """A layer of a transformer with dropout, and the loss."""

    def __init__(self, act: nn.Module | None = None) -> None:
        super().__init__()
        self.norm, self.last = nn.LayerNorm(16), nn.LayerNorm(16)
        self.given, self.out = nn.Linear(16, 48), nn.Linear(16, 16)
        self.act, self.drop = act or nn.GELU(), nn.Dropout(0.1)

    def forward(self, x: Tensor, label: Tensor) -> Tensor:
        parts = (
            one.unflatten(-1, (2, 8)).transpose(1, 2)
            for one in self.given(self.norm(x)).split(16, 2)
        )
        mixed = nn.functional.scaled_dot_product_attention(*parts, is_causal=True)
        x = x + self.drop(self.act(self.out(mixed.transpose(1, 2).flatten(2))))
        return nn.functional.cross_entropy(self.last(x).flatten(0, 1), label)


class Convolving(nn.Module):
    """Convolutions, a norm over the batch and one over groups, and the loss."""

    def __init__(self) -> None:
        super().__init__()
        first = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU()
        self.layers = nn.Sequential(*first, nn.Conv2d(8, 8, 3), nn.GroupNorm(2, 8), nn.SiLU())
        self.head = nn.Linear(8, 5)

    def forward(self, x: Tensor, label: Tensor) -> Tensor:
        return nn.functional.cross_entropy(self.head(self.layers(x).mean((2, 3))), label)


class Chosen(Exception):
    """Raised instead of the code for a choice, which takes seconds."""


SEQUENCES = torch.randn(2, 6, 16), torch.randint(16, (12,))
IMAGES = torch.randn(2, 3, 8, 8), torch.randint(5, (2,))


def train(
    model: nn.Module,
    batch: Sequence[Tensor],
    choose: Choose,
    dtype: torch.dtype = torch.float32,
    *,
    casts: bool = True,
) -> None:
    """Compile a model without kernels, and run it. `dtype`: of its parameters. `casts`: under autocast."""
    torch._dynamo.reset()

    def backend(graph: fx.GraphModule, inputs: Sequence[Any]) -> Any:
        def chosen(*given: Any) -> list[fx.Node]:
            choose(*given)
            raise Chosen

        with contextlib.suppress(Chosen):
            dry(graph, inputs, chosen)
        return graph

    x, label = batch
    with torch.autocast("cpu", torch.bfloat16, enabled=casts):
        torch.compile(model.to(dtype), backend=backend)(x.to(dtype), label).backward()


def planned(model: nn.Module, batch: Sequence[Tensor]) -> CompiledGraph:
    """Return a plan that saves what torch saves."""
    found: list[Joint] = []

    def choose(graph: fx.Graph, info: Any, own: Callable[[], list[fx.Node]]) -> list[fx.Node]:
        chosen = own()
        found.append(JointBuilder(graph, info).build(chosen))
        return chosen

    train(model, batch, choose)
    (joint,) = found
    (graph,) = named({joint.key: joint.own}, {joint.key: joint})
    return graph


@pytest.mark.parametrize(("make", "batch"), [(Attending, SEQUENCES), (Convolving, IMAGES)])
@pytest.mark.slow
def test_a_plan_under_autocast_applies_in_float64(
    make: Callable[[], nn.Module], batch: Sequence[Tensor]
) -> None:
    """Its certificate runs it there, where the graph has no casts."""
    plan = planned(make(), batch)
    applied, saved = Applied([plan]), set[str]()

    def choose(graph: fx.Graph, info: Any, own: Callable[[], list[fx.Node]]) -> list[fx.Node]:
        names, chosen = double_keys_of(graph), applied._choose(graph, info, own)
        assert len(chosen) - len(info.inputs) <= len(plan.double_saves)
        saved.update(names[node] for node in chosen)
        return chosen

    train(make(), batch, choose, torch.float64)
    assert not applied.unused
    assert saved >= {*plan.double_saves}
    assert len(plan.saves) >= len(plan.double_saves) > 4


@pytest.mark.parametrize(
    ("other", "dtype", "casts"),
    [(Attending(), torch.float32, False), (Attending(nn.ReLU()), torch.float64, True)],
)
def test_another_program_is_not_taken_for_the_plans(
    other: nn.Module, dtype: torch.dtype, casts: bool
) -> None:
    """Without autocast in the program's own precision, what is saved takes other bytes."""
    applied = Applied([planned(Attending(), SEQUENCES)])
    seen: list[str] = []

    def choose(graph: fx.Graph, info: Any, own: Callable[[], list[fx.Node]]) -> list[fx.Node]:
        with pytest.raises(NotPlanned):
            applied._choose(graph, info, own)
        seen.append("")
        return own()

    train(other, SEQUENCES, choose, dtype, casts=casts)
    assert seen
    assert applied.unused
