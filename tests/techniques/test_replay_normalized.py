"""A batch norm that runs again with the statistics that it found gives the same bits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from torchtrim.techniques.replay.recipes import (
    KeptTensor,
    RecipeStep,
    as_first,
    filled,
    with_statistics,
    without_writes,
)
from torchtrim.techniques.replay.table import BATCH_NORMS, is_dense
from torchtrim.techniques.replay.watching import watch

NORM = torch.ops.aten.native_batch_norm.default
SHAPES = ((4, 3), (3, 5, 7), (2, 8, 5, 5), (1, 1, 4, 4), (2, 17, 1, 3), (2, 3, 2, 3, 4))
LAST = {4: torch.channels_last, 5: torch.channels_last_3d}


class Seen(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Whether each batch norm that runs finds its statistics."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.trains: list[bool] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is NORM:
            self.trains.append(args[5])
        return func(*args, **(kwargs or {}))


@given(data=st.data(), seed=st.integers(0, 2**32 - 1))
def test_it_gives_the_same_bits(data: st.DataObject, seed: int) -> None:
    shape = data.draw(st.sampled_from(SHAPES))
    dtype = data.draw(st.sampled_from((torch.float32, torch.float64, torch.bfloat16)))
    kind = data.draw(st.sampled_from(("rows", "channels last", "every second")))
    torch.manual_seed(seed)
    x = (torch.randn(shape, dtype=torch.float64) * 10 ** data.draw(st.integers(-3, 4))).to(dtype)
    if data.draw(st.booleans()):
        x.view(-1)[0] = data.draw(st.sampled_from((float("inf"), float("nan"), 0.0)))
    if kind == "channels last" and len(shape) in LAST:
        x = x.to(memory_format=LAST[len(shape)])
    if kind == "every second":
        x = torch.stack([x, x], -1)[..., 0]
    own = data.draw(st.sampled_from((dtype, torch.float32))) if dtype.itemsize == 2 else dtype
    weight, bias = (
        torch.randn(shape[1]).to(own) if data.draw(st.booleans()) else None for _ in range(2)
    )
    tracked = data.draw(st.booleans())
    running = (
        (torch.zeros(shape[1]).to(own), torch.ones(shape[1]).to(own)) if tracked else (None,) * 2
    )
    eps = data.draw(st.sampled_from((1e-5, 1e-3, 0.0)))
    args = (x, weight, bias, *running, True, 0.1, eps)
    result = NORM(*args)
    held = tuple(KeptTensor(a) if isinstance(a, torch.Tensor) else a for a in without_writes(args))
    with as_first():
        step = with_statistics(RecipeStep(NORM, held, {}), args, result)
        again = step.func(*filled(step.args), **filled(step.kwargs))
    made = again[0] if isinstance(again, tuple) else again
    assert torch.equal(made.nan_to_num(), result[0].nan_to_num())
    assert torch.equal(made.isnan(), result[0].isnan())
    assert made.stride() == result[0].stride()
    plain = dtype != torch.bfloat16 and is_dense(tuple(shape), x.stride())
    assert (step.func is not NORM) == plain


@pytest.mark.parametrize("last", [False, True], ids=["rows", "channels last"])
def test_gradients_and_statistics_are_those_of_the_model_without_a_plan(last: bool) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.GELU(), nn.Conv2d(8, 4, 3))
    x = torch.randn(4, 3, 16, 16)
    if last:
        model, x = (
            model.to(memory_format=torch.channels_last),
            x.to(memory_format=torch.channels_last),
        )  # type: ignore[call-overload]
    state = {name: value.clone() for name, value in model.state_dict().items()}

    def step() -> list[torch.Tensor]:
        model.load_state_dict(state)
        model.zero_grad()
        model(x).square().mean().backward()
        return [
            *(p.grad.clone() for p in model.parameters()),
            *(b.clone() for b in model.buffers()),
        ]

    wanted = step()
    handle = watch({"Net": model}, ["Net:native_batch_norm.0"])
    with Seen() as seen:
        found = step()
    handle.revert()
    assert seen.trains == [True, False]
    assert all(map(torch.equal, wanted, found))


def test_a_norm_that_does_not_train_runs_as_it_is() -> None:
    model = nn.Sequential(nn.BatchNorm2d(3), nn.GELU()).eval()
    x = torch.randn(2, 3, 4, 4, requires_grad=True)
    handle = watch({"Net": model}, ["Net:native_batch_norm.0"])
    with Seen() as seen:
        model(x).sum().backward()
    handle.revert()
    assert seen.trains == [False, False]


class Written(nn.Module):
    """The mean that a norm found is written to, which nothing else would notice."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Conv2d(3, 4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made, mean, _ = torch.native_batch_norm(x, None, None, None, None, True, 0.0, 1e-5)
        mean.mul_(2)
        result: torch.Tensor = self.last(made)
        return result


def test_statistics_may_be_written_to() -> None:
    torch.manual_seed(0)
    model, x, found = Written(), torch.randn(2, 3, 8, 8), []
    for places in ([], ["Net:native_batch_norm.0"]):
        handle = watch({"Net": model}, places)
        model.zero_grad()
        model(x).square().sum().backward()
        handle.revert()
        assert model.last.weight.grad is not None
        found.append(model.last.weight.grad.clone())
    assert torch.equal(*found)


def test_others_are_made_only_where_the_type_rests_on_them() -> None:
    ones, x = torch.ones(3), torch.randn(2, 3, 4, 4).bfloat16()
    for weight, wanted in ((ones, type(None)), (None, torch.Tensor)):
        args = without_writes((x, weight, weight, ones, ones, True, 0.1, 1e-5))
        assert all(isinstance(one, wanted) for one in args[3:5])


@pytest.mark.parametrize("name", sorted(BATCH_NORMS))
def test_those_of_gpus_have_the_same_arguments(name: str) -> None:
    schema = getattr(torch.ops.aten, name).default._schema
    given = ["input", "weight", "bias", "running_mean", "running_var", "training"]
    assert [one.name for one in schema.arguments[:6]] == given
    assert str(schema.returns[0].type) == "Tensor"
