"""Techniques under hooks on all modules."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import torchtrim
from steps import squared
from torchtrim.executor.registry import technique
from torchtrim.records.plan import Technique
from torchtrim.step.from_profile import step_of

LOG: list[int] = []
RERUNS = {"recompute", "recompute_function"}


class Net(nn.Module):
    def __init__(self) -> None:
        torch.manual_seed(0)
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 64))

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.inner(x)
        return result


def planned(name: str, net: nn.Module) -> None:
    options = {"parts": 4} if name == "micro_batch" else {}
    technique(name).apply({"Net": net}, Technique(name=name, where=("Net.inner",), options=options))


def gradients(net: nn.Module, x: Tensor) -> list[Tensor]:
    net.zero_grad()
    given = x.clone().requires_grad_()
    squared(net, given).backward()
    assert given.grad is not None
    return [given.grad, *(p.grad.clone() for p in net.parameters() if p.grad is not None)]


@pytest.mark.parametrize(
    ("register", "hook", "offered"),
    [
        ("register_module_forward_hook", lambda module, args, out: None, RERUNS),
        ("register_module_forward_hook", lambda module, args, out: LOG.append(1), RERUNS),
        ("register_module_forward_hook", lambda module, args, out: LOG.extend([1]), set()),
        ("register_module_full_backward_hook", lambda module, before, after: None, set()),
    ],
)
def test_what_is_offered(register: str, hook: Callable[..., None], offered: set[str]) -> None:
    """A part of a batch is not what a hook would be given; a rerun is, if it writes nothing or appends."""
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)
    batch = torch.randn(128, 64, requires_grad=True)
    removable = getattr(nn.modules.module, register)(hook)
    try:
        recorded = step_of(torchtrim.record(torchtrim.TrainStep(net, squared, optimizer, batch)))
    finally:
        removable.remove()
    units = {*RERUNS, "micro_batch", "split_matmul"}
    assert {one for one in units if technique(one).options(recorded)} == offered


@pytest.mark.parametrize("name", ["micro_batch", "recompute"])
def test_hooks_on_all_backwards_run_as_often_as_before(name: str) -> None:
    net, x = Net(), torch.randn(8, 64)
    planned(name, net)
    gradients(net, x)
    seen: list[str] = []
    hook = nn.modules.module.register_module_full_backward_hook(
        lambda module, *_: seen.append(type(module).__name__)
    )
    gradients(net, x)
    hook.remove()
    assert sorted(seen) == sorted(type(module).__name__ for module in net.modules())


@pytest.mark.parametrize("appends", [True, False])
def test_a_block_reruns_under_hooks_that_write_nothing_or_append(
    appends: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    net, x = Net(), torch.randn(8, 64)
    kept = len(saved_by(net, x))
    seen: list[str] = []
    hooked = nn.modules.module.register_module_forward_hook
    pure = hooked(lambda module, args, out: out * 0.5)
    expected = gradients(net, x)
    planned("recompute", net)
    assert all(map(torch.equal, expected, gradients(net, x)))
    assert len(saved_by(net, x)) < kept
    if appends:
        noting = hooked(lambda module, args, out: seen.append(type(module).__name__))
    else:
        noting = hooked(lambda module, args, out: seen.extend([type(module).__name__]))
    assert all(map(torch.equal, expected, gradients(net, x)))
    noting.remove()
    pure.remove()
    assert seen == ["Linear", "ReLU", "Linear", "Sequential", "Net"]
    assert ("runs without the plan" in capsys.readouterr().err) is not appends


def saved_by(net: nn.Module, x: Tensor) -> list[Tensor]:
    """Return the tensors that autograd saves in a call of a model."""
    kept: list[Tensor] = []

    def pack(one: Tensor) -> Tensor:
        kept.append(one)
        return one

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda one: one):
        net(x)
    return kept
