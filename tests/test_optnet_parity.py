"""OptNet's own tests on its 18 networks, and what they leave out: a second call, another batch, undo.

The large ones run on one sample; of the published size the plan alone is looked at, and `bench/optnet.py`
runs it.
"""

from collections.abc import Iterable

import pytest
import torch
from _pytest.mark import ParameterSet
from torch import Tensor, nn

import torchtrim
from optnet_models import NETWORKS

MIB = 2**20
PUBLISHED = {"alexnet": 90.25, "vgg-A": 1960, "googlenet": 490, "resnet-110": 24}
HEAVY = ("alexnet", "vgg-A", "googlenet")
SLOW = (
    *("alexnet", "vgg-A", "googlenet", "resnet-32", "resnet-56", "resnet-110"),
    *("preresnet-32", "preresnet-56", "preresnet-110"),
)
"""Large or deep ones whose kind is here as a smaller network."""


def each(names: Iterable[str], slow: Iterable[str] = SLOW) -> list[ParameterSet]:
    """A test's parameters: networks by name."""
    return [pytest.param(n, marks=pytest.mark.slow if n in slow else ()) for n in sorted(names)]


def made(name: str, batch: int) -> tuple[nn.Module, tuple[Tensor, ...]]:
    torch.manual_seed(0)
    model, sample = NETWORKS[name]()
    return model.eval(), tuple(torch.randn(batch, *x.shape[1:]) for x in sample)


def flat(result: object) -> tuple[Tensor, ...]:
    return result if isinstance(result, tuple) else (result,)  # type: ignore[return-value]


def called(model: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    with torch.no_grad():
        return flat(model(*inputs))


def gradients(model: nn.Module, inputs: tuple[Tensor, ...]) -> list[Tensor]:
    leaves = [x.clone().requires_grad_() for x in inputs]
    sum(out.square().sum() for out in flat(model(*leaves))).backward()
    found = [x.grad for x in leaves] + [p.grad for p in model.parameters()]
    model.zero_grad()
    return [grad.clone() for grad in found if grad is not None]


@pytest.mark.parametrize("name", each(NETWORKS))
def test_results_are_equal_memory_is_less_and_undo_is_whole(name: str) -> None:
    batch = 1 if name in HEAVY else 3
    model, inputs = made(name, batch)
    seconds = tuple(x.flip(0) * 2 for x in inputs)
    calls = [inputs, seconds] if name in HEAVY else [inputs, seconds, tuple(x[1:] for x in inputs)]
    wanted = [called(model, given) for given in calls]
    slopes = None if name in HEAVY else gradients(model, inputs)
    state = {key: value.clone() for key, value in model.state_dict().items()}
    before = torchtrim.count_memory(model, inputs)

    fitted = torchtrim.optimize_memory(model, inputs, verify=False)
    assert fitted.notes == ()
    assert fitted.after.outputs <= before.outputs <= before.made
    for given, result in zip(calls, wanted, strict=True):
        for got, want in zip(called(model, given), result, strict=True):
            assert torch.equal(got, want)
    fitted.revert()

    assert torchtrim.count_memory(model, inputs) == before
    assert list(model.state_dict()) == list(state)
    assert all(torch.equal(value, state[key]) for key, value in model.state_dict().items())
    assert all(torch.equal(*pair) for pair in zip(called(model, inputs), wanted[0], strict=True))
    if slopes is not None:
        after = gradients(model, inputs)
        assert all(torch.equal(*pair) for pair in zip(slopes, after, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("name", each(NETWORKS))
def test_training_gives_every_gradient_in_less_memory(name: str) -> None:
    model, inputs = made(name, 1 if name in HEAVY else 3)
    model.train()
    state = {key: value.clone() for key, value in model.state_dict().items()}
    wanted = gradients(model, inputs)
    left = {key: value.clone() for key, value in model.state_dict().items()}
    model.load_state_dict(state)
    before = torchtrim.count_memory(model, inputs, "training")

    fitted = torchtrim.optimize_memory(model, inputs, "training", verify=False)
    assert fitted.before == before
    assert fitted.after.total <= before.total
    assert all(map(torch.equal, gradients(model, inputs), wanted))
    assert all(torch.equal(value, left[key]) for key, value in model.state_dict().items())
    model.load_state_dict(state)
    fitted.revert()
    assert torchtrim.count_memory(model, inputs, "training") == before
    assert all(map(torch.equal, gradients(model, inputs), wanted))


@pytest.mark.slow
@pytest.mark.parametrize("name", each(PUBLISHED, {*SLOW} - {"googlenet"}))
def test_the_published_size_is_planned_within_the_goal(name: str) -> None:
    """Nothing of that size is allocated: the batch is one sample, expanded."""
    model, sample = made(name, 1)
    inputs = tuple(x.expand(128, *x.shape[1:]) for x in sample)
    bare = torchtrim.optimize_memory(model, inputs, verify=False, reuse_buffers=False)
    bare.revert()
    assert bare.after.outputs <= PUBLISHED[name] * MIB
    whole = torchtrim.optimize_memory(model, inputs, verify=False)
    whole.revert()
    parts = torchtrim.optimize_memory(model, inputs, verify=False, split_batch=16)
    parts.revert()
    returned = sum(x.numel() * x.element_size() for x in result_of(model, inputs))
    assert whole.after.outputs <= PUBLISHED[name] * MIB + returned
    assert whole.after.workspace <= 0.02 * whole.after.outputs
    assert parts.after.outputs + parts.after.workspace <= PUBLISHED[name] * MIB / 8


def result_of(model: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Of the shape only: on `meta`."""
    return called(model.to("meta"), tuple(x.to("meta") for x in inputs))
