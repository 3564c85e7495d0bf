"""Replay where it is easily wrong: views, writes in place, autocast, two backward passes, checkpoints."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import torchtrim
from steps import Rereading, train_step
from torchtrim.executor.registry import Handle
from torchtrim.records.plan import Technique
from torchtrim.step.from_profile import step_of
from torchtrim.techniques.replay import groups
from torchtrim.techniques.replay.technique import TECHNIQUE

Function = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


class Net(nn.Module):
    """Any function of an input and a weight."""

    def __init__(self, function: Function) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(-1, 1, 64).view(8, 8))
        self.function = function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(x, self.weight)


def batch() -> torch.Tensor:
    return torch.linspace(-2, 2, 48).view(6, 8).sin()


def apply(net: nn.Module, *where: str) -> Handle:
    return TECHNIQUE.apply({"Net": net}, Technique(name="replay", where=where))


def gradient(net: Net, x: torch.Tensor) -> torch.Tensor:
    net.zero_grad()
    net(x).square().sum().backward()
    assert net.weight.grad is not None
    return net.weight.grad.clone()


def agrees(function: Function, *where: str) -> None:
    """Gradients with the places planned are those without."""
    net, x = Net(function), batch()
    expected = gradient(net, x)
    handle = apply(net, *where)
    assert torch.equal(gradient(net, x), expected)
    handle.revert()


class Gelus(TorchDispatchMode):
    """Counts the gelus that run."""

    count = 0

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func is torch.ops.aten.gelu.default
        return func(*args, **(kwargs or {}))


def again(net: Net, x: torch.Tensor) -> int:
    """How many gelus run in backward."""
    out = net(x).square().sum()
    with Gelus() as gelus:
        out.backward()
    return gelus.count


def gelu(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return F.gelu(x @ w) @ w


def test_a_planned_operator_runs_again_and_once() -> None:
    net, x = Net(lambda x, w: (h := F.gelu(x @ w)) @ w + h * h), batch()
    assert again(net, x) == 0
    apply(net, "Net:gelu.0")
    assert again(net, x) == 1


def view_of_it(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    h = F.gelu(x @ w)
    return h.view(12, 4).t() @ h.reshape(12, 4) @ w[:4] + h[1:, 2:].sum()


def written_first(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return F.relu((x @ w) * 2, inplace=True) @ w


def written_by_another(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    h = F.gelu(x @ w)
    h[:, 0].zero_()
    return h @ w


def input_written_later(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    made = x @ w
    copied = made.clone()
    made.add_(1)
    return (copied @ w) * made.sum()


def several(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return torch.cat([F.gelu(x @ w), x @ w], 1)[:, 4:12].contiguous() @ w


def in_bfloat16(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return (F.gelu(x @ w) @ w).float()


def without_gradients(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        scale = F.gelu(x).mean()
    return gelu(x, w) * scale


def checkpointed(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return checkpoint(gelu, gelu(x, w), w, use_reentrant=False)


def penalized(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    out = gelu(x, w)
    (slope,) = torch.autograd.grad(out.square().sum(), w, create_graph=True)
    return out + slope.square().sum()


@pytest.mark.parametrize(
    ("function", "where"),
    [
        (view_of_it, "Net:gelu.0"),
        (view_of_it, "Net:mm.0,gelu.0"),
        (written_first, "Net:mul.0,relu_.0"),
        (written_first, "Net:mul.0"),
        (written_by_another, "Net:gelu.0"),
        (input_written_later, "Net:clone.0"),
        (input_written_later, "Net:mm.0,clone.0"),
        (several, "Net:cat.0,clone.0"),
        (in_bfloat16, "Net:gelu.0"),
        (in_bfloat16, "Net:_to_copy.0,_to_copy.1,mm.0,gelu.0"),
        (without_gradients, "Net:gelu.0"),
        (without_gradients, "Net:gelu.1"),
        (checkpointed, "Net:gelu.0"),
        (checkpointed, "Net:gelu.1"),
        (penalized, "Net:gelu.0"),
        (penalized, "Net:mm.0,gelu.0"),
    ],
)
def test_every_bit_agrees(function: Function, where: str) -> None:
    agrees(function, where)


def test_a_retained_graph_gives_the_same_twice() -> None:
    net, x = Net(gelu), batch()
    expected = gradient(net, x)
    apply(net, "Net:mm.0,gelu.0")
    net.zero_grad()
    loss = net(x).square().sum()
    for _ in range(3):
        (found,) = torch.autograd.grad(loss, net.weight, retain_graph=True)
        assert torch.equal(found, expected)


def test_what_backward_looks_at_twice_is_made_again_once() -> None:
    def product(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return Rereading.apply(F.gelu(x @ w), w)  # type: ignore[no-any-return, no-untyped-call]

    net, x = Net(product), batch()
    expected = gradient(net, x)
    apply(net, "Net:gelu.0")
    assert again(net, x) == 1
    assert torch.equal(gradient(net, x), expected)


def test_a_second_derivative_is_right() -> None:
    net, x = Net(gelu), batch()

    def second() -> torch.Tensor:
        (first,) = torch.autograd.grad(net(x).square().sum(), net.weight, create_graph=True)
        (found,) = torch.autograd.grad(first.square().sum(), net.weight)
        return found

    expected = second()
    apply(net, "Net:mm.0,gelu.0")
    assert torch.equal(second(), expected)


def test_a_module_that_is_called_twice() -> None:
    def twice(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return inner(inner(x))

    inner = Net(gelu)
    outer = Net(twice)
    outer.inner, outer.weight = inner, inner.weight
    x = batch()
    expected = gradient(outer, x)
    apply(outer, "Net.inner:gelu.0", "Net:mm.2")
    assert torch.equal(gradient(outer, x), expected)


def test_what_is_written_before_backward_is_an_error_as_ever() -> None:
    net, kept = Net(lambda x, w: kept.append(x @ w) or F.gelu(kept[-1]) @ w), []
    for places in ((), ("Net:gelu.0",)):
        handle = apply(net, *places)
        out = net(batch()).sum()
        with torch.no_grad():
            kept[-1].add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            out.backward()
        handle.revert()


def test_an_exception_leaves_nothing_on() -> None:
    net, x = Net(gelu), batch()
    expected = gradient(net, x)
    apply(net, "Net:gelu.0")
    for _ in range(2):
        with pytest.raises(RuntimeError):
            net(torch.ones(2, 3))
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None
    assert torch.equal(gradient(net, x), expected)


def test_under_hooks_of_others_nothing_is_done() -> None:
    net, x, seen = Net(gelu), batch(), []
    apply(net, "Net:gelu.0")
    with torch.autograd.graph.saved_tensors_hooks(
        lambda t: seen.append(t) or t.clone(), lambda t: t
    ):
        net(x).sum().backward()
    assert seen


UNDER_HOOKS = {
    "around": lambda hooks: (hooks, contextlib.nullcontext),
    "within": lambda hooks: (contextlib.nullcontext, hooks),
}


@pytest.mark.parametrize("where", UNDER_HOOKS)
def test_where_hooks_of_others_take_the_saving_it_is_told_once(
    where: str, capsys: pytest.CaptureFixture[str]
) -> None:
    around, within = UNDER_HOOKS[where](torch.autograd.graph.save_on_cpu)
    late = []

    def function(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        with within() if late else contextlib.nullcontext():
            return gelu(x, w)

    net, x = Net(function), batch()
    apply(net, "Net:gelu.0")
    for _ in range(2):
        net(x).sum().backward()
    with torch.no_grad(), torch.autograd.graph.save_on_cpu():
        net(x)
    assert capsys.readouterr().err == ""
    late.append(True)
    for _ in range(3):
        with around():
            net(x).sum().backward()
    said = capsys.readouterr().err
    assert said.count("torchtrim: ") == 1
    assert "`Net:gelu.0`: runs under hooks on saved tensors" in said
    assert "replay saves nothing" in said


def test_the_graph_is_freed_without_a_collection() -> None:
    seen: list[StorageWeakRef] = []

    def noting(x: torch.Tensor) -> torch.Tensor:
        seen.append(StorageWeakRef(x.untyped_storage()))
        return x

    net = Net(lambda x, w: noting(torch.tanh(F.relu(F.gelu(noting(x @ w)) @ w))) * w.sum())
    apply(net, "Net:gelu.0", "Net:relu.0")
    gc.disable()
    try:
        out = net(batch())
        assert not any(one.expired() for one in seen)
        del out
        assert all(one.expired() for one in seen)
    finally:
        gc.enable()


STEPS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "gelu": lambda x, w: F.gelu(x),
    "silu": lambda x, w: F.silu(x),
    "tanh": lambda x, w: torch.tanh(x),
    "norm": lambda x, w: F.layer_norm(x, (8,), w[0], w[1]),
    "softmax": lambda x, w: F.softmax(x, -1),
    "matrix": lambda x, w: x @ w,
    "linear": lambda x, w: F.linear(x, w, w[0]),
    "half": lambda x, w: x.to(torch.float64).exp().clamp(max=9).to(torch.float32),
    "copy": lambda x, w: x.t().contiguous().t() * x,
    "view": lambda x, w: x.reshape(-1).view(x.shape)[:, [1, 0, 2, 3, 4, 5, 6, 7]],
    "half of it": lambda x, w: torch.cat([x[:, :4], torch.sigmoid(x[:, 4:])], 1),
    "in place": lambda x, w: F.relu(x * 1.5, inplace=True),
    "added": lambda x, w: (x * w[0]).add_(w[1]),
    "part": lambda x, w: _written(x * 2, w),
    "dropout": lambda x, w: F.dropout(x, 0.3),
    "around": lambda x, w: x + F.gelu(x @ w),
    "product": lambda x, w: x * torch.sigmoid(x),
}


def _written(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    x[:, ::2] = w[0, ::2] * 0.5
    return x


@pytest.mark.slow
@given(
    st.lists(st.sampled_from(sorted(STEPS)), min_size=2, max_size=7),
    st.randoms(use_true_random=False),
)
def test_chains_of_operators(names: list[str], rng: object) -> None:
    def chain(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        torch.manual_seed(1)
        x = x * w.sum()
        for name in names:
            x = STEPS[name](x, w)
        return x

    net, x = Net(chain), batch()
    expected = gradient(net, x)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(groups, "_LEAST_BYTES", 1)
        step = step_of(torchtrim.record(train_step(net, x, "SGD")))
        places = [option.where for option in TECHNIQUE.options(step)]
    rng.shuffle(places)  # type: ignore[attr-defined]
    net.weight.data = Net(chain).weight.data
    handle = apply(net, *places)
    assert torch.equal(gradient(net, x), expected)
    handle.revert()
