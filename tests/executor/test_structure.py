"""A rerun has the modules, hooks and code of its forward, which the program may change before backward."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.module import register_module_forward_hook
from torch.nn.utils import parametrizations, spectral_norm

from torchtrim.executor.registry import technique
from torchtrim.records.plan import Technique

HERE = sys.modules[__name__]
PLACES = {
    "recompute": (("Net.block",), {}),
    "recompute in parts": (("Net.block.linear", "Net.block.norm", "Net.block.act"), {}),
    "recompute a range": (("Net.chain[0:2]",), {}),
    "recompute_function": ((f"Net:{__name__}.activated",), {}),
    "micro_batch": (("Net.block",), {"parts": 2}),
    "split_matmul": (("Net.block.linear",), {"parts": 2}),
}


def curve(x: Tensor) -> Tensor:
    return torch.tanh(x)


def activated(x: Tensor) -> Tensor:
    return curve(x).exp()


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm, self.act = nn.Linear(8, 8), nn.LayerNorm(8), nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        return F.gelu(activated(self.act(self.norm(self.linear(x)))) - 1.5) + x


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = Block()
        self.chain = nn.Sequential(nn.Linear(8, 8), nn.Sigmoid(), nn.Linear(8, 8))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.chain(self.block(x))
        return out


def doubled(_: Any, __: Any, out: Any) -> Any:
    return out * 2


def hooked(net: Net, _: pytest.MonkeyPatch) -> None:
    net.block.linear.register_forward_hook(doubled)
    net.chain[0].register_forward_hook(doubled)


def given_other_inputs(net: Net, _: pytest.MonkeyPatch) -> None:
    net.block.linear.register_forward_pre_hook(lambda _, given: (given[0] * 2,))


def hooked_in_backward(net: Net, _: pytest.MonkeyPatch) -> None:
    hook: Any = lambda _, grads, __: (grads[0] * 2,)  # noqa: E731
    net.block.linear.register_full_backward_hook(hook)


def all_hooked(_: Net, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(HERE, "handle", register_module_forward_hook(doubled), raising=False)


def with_another_layer(net: Net, _: pytest.MonkeyPatch) -> None:
    net.block.linear, net.chain[0] = nn.Linear(8, 8), nn.Linear(8, 8)


def without_activation(net: Net, _: pytest.MonkeyPatch) -> None:
    net.block.act = nn.Identity()


def of_another_class(net: Net, _: pytest.MonkeyPatch) -> None:
    net.block.act.__class__ = nn.Tanh  # type: ignore[assignment]


def swapped(net: Net, _: pytest.MonkeyPatch) -> None:
    net.block.linear, net.chain[0] = net.chain[0], net.block.linear


def reparametrized(net: Net, _: pytest.MonkeyPatch) -> None:
    parametrizations.weight_norm(net.block.linear)


def normalized(net: Net, _: pytest.MonkeyPatch) -> None:
    spectral_norm(net.block.linear)


def with_another_function(_: Net, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(HERE, "curve", torch.sin)


def with_another_function_of_torch(_: Net, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(F, "gelu", torch.sin)


def with_another_forward(_: Net, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(nn.LayerNorm, "forward", lambda _, x: x * 2)


def frozen(net: Net, _: pytest.MonkeyPatch) -> None:
    net.block.linear.weight.requires_grad_(False)


CHANGES = (
    hooked,
    given_other_inputs,
    hooked_in_backward,
    all_hooked,
    with_another_layer,
    without_activation,
    of_another_class,
    swapped,
    reparametrized,
    normalized,
    with_another_function,
    with_another_function_of_torch,
    with_another_forward,
    frozen,
)


def gradients(
    change: Callable[[Net, pytest.MonkeyPatch], None], place: str = ""
) -> list[Tensor | None]:
    """The gradients of a step whose model changes before backward, and the changed model's output."""
    torch.manual_seed(0)
    net, x = Net(), torch.randn(6, 8, requires_grad=True)
    with contextlib.ExitStack() as reverted, pytest.MonkeyPatch.context() as patch:
        if place:
            where, options = PLACES[place]
            plan = Technique(name=place.split()[0], where=where, options=options)
            reverted.callback(technique(plan.name).apply({"Net": net}, plan).revert)
        loss = net(x).square().sum()
        parameters = [*net.parameters()]
        change(net, patch)
        names = [*net.state_dict()]
        loss.backward()
        after = net(x.detach())
        assert [*net.state_dict()] == names
        if (handle := getattr(HERE, "handle", None)) is not None:
            handle.remove()
    return [x.grad, *(one.grad for one in parameters), after.detach()]


@pytest.mark.parametrize("change", CHANGES, ids=lambda one: one.__name__)
@pytest.mark.parametrize("place", PLACES)
def test_a_rerun_has_the_structure_of_its_forward(
    place: str, change: Callable[[Net, pytest.MonkeyPatch], None]
) -> None:
    plain, planned = gradients(change), gradients(change, place)
    assert [one is None for one in planned] == [one is None for one in plain]
    for one, other in zip(plain, planned, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("replaced", [False, True])
def test_a_hook_on_all_that_is_removed_before_backward_runs_again(replaced: bool) -> None:
    found = []
    for planned in (False, True):
        torch.manual_seed(0)
        net, x = Net(), torch.randn(6, 8)
        if planned:
            plan = Technique(name="recompute", where=("Net.block",))
            technique("recompute").apply({"Net": net}, plan)
        hook: Any = lambda _, __, named, out: out * (0.5 + len(named))  # noqa: E731
        handle = register_module_forward_hook(hook, with_kwargs=True)
        out = net(x)
        handle.remove()
        after = register_module_forward_hook(hook, with_kwargs=True) if replaced else handle
        out.square().sum().backward()
        after.remove()
        found.append([one.grad for one in net.parameters()])
    for plain, other in zip(*found, strict=True):
        torch.testing.assert_close(other, plain)


def test_a_recurrent_layer_reruns_with_its_own_weights() -> None:
    """It reads them from a list, which it changes in place."""
    found = []
    for planned in (False, True):
        torch.manual_seed(0)
        layer, x = nn.GRU(4, 4), torch.randn(3, 2, 4)
        if planned:
            plan = Technique(name="recompute", where=("GRU",))
            technique("recompute").apply({"GRU": layer}, plan)
        out, _ = layer(x)
        before = [*layer.parameters()]
        layer.weight_hh_l0 = nn.Parameter(torch.ones(12, 4))
        out.square().sum().backward()
        after, _ = layer(x)
        found.append([after.detach(), *(one.grad for one in before)])
    assert all(map(torch.equal, *found))


@pytest.mark.parametrize("overwrites", [False, True])
def test_parts_of_a_norm_have_its_settings_of_forward(overwrites: bool) -> None:
    found = []
    for planned in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Conv1d(4, 4, 1), nn.BatchNorm1d(4), nn.LeakyReLU(0.1))
        x = torch.randn(3, 4, 5)
        if planned:
            options = {"parts": 2, "overwrites": overwrites}
            plan = Technique(name="split_channels", where=("Net[1:3]",), options=options)
            technique("split_channels").apply({"Net": model}, plan)
        out = model(x)
        model[1].eps, model[2].negative_slope = 1.0, 0.9
        out.square().sum().backward()
        found.append([one.grad for one in model.parameters()])
    for plain, other in zip(*found, strict=True):
        torch.testing.assert_close(other, plain)
