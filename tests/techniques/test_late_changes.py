"""What a program begins to do after its certified steps: right, or stopped with its cause."""

from __future__ import annotations

import contextlib
import copy
import functools
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from bench.late.changes import SHAPES, Case, drawn
from bench.late.running import Planner, judged
from msgspec.structs import replace
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import draws
from torchtrim.emulator import emulate
from torchtrim.errors import ApplyFailed
from torchtrim.executor import notices
from torchtrim.executor.apply import named_roots
from torchtrim.executor.half_precision import _storages_of
from torchtrim.executor.registry import Handle, technique, unseen_by
from torchtrim.records.plan import Equivalence, Technique

FAULTS = ("SILENT", "WRONG CAUSE", "LATE STOP")
ON_CPU = (
    *(
        "chunked_loss",
        "micro_batch",
        "offload_activations",
        "offload_optimizer",
        "optimizer_in_backward",
    ),
    *("recompute", "replay"),
)
"""Techniques that have a place in each model of the bench, on a CPU."""


def test_drawn_changes_are_right_or_stopped_with_their_cause() -> None:
    """Changes of one model under few techniques; bench.late_changes makes the whole table."""
    rng = random.Random(draws.seed())
    shape = rng.choice(sorted(SHAPES))
    planner = Planner(shape, "AdamW", draws.seed())
    few = rng.sample(ON_CPU, 4 if draws.is_full() else 1)
    plans = [(name, planner.plan(name)) for name in few]
    cases = drawn(draws.seed())
    for _ in range(48 if draws.is_full() else 4):
        case = next(cases)._replace(shape=shape, optimizer="AdamW", late=4, steps=7)
        name, plan = rng.choice(plans)
        assert plan is not None
        (verdict,) = judged(case, {name: plan}).values()
        assert not verdict.startswith(FAULTS), (name, case.name, verdict)


def test_the_judge_finds_what_is_silent() -> None:
    """A technique that lies: it scales the learning rate, and claims that every bit agrees."""
    honest = Planner("mlp", "SGD").plan("scale_lr")
    assert honest is not None
    (one,) = honest.techniques
    lies = replace(honest, techniques=(replace(one, equivalence="BITWISE"),))
    (verdict,) = judged(Case(), {"scale_lr": lies}).values()
    assert verdict.startswith("SILENT")


def applied(name: str, where: str, *roots: Any, **options: Any) -> Handle:
    unit = technique(name)
    equivalence: Equivalence = unit.equivalence
    plan = Technique(name=name, where=(where,), options=options, equivalence=equivalence)
    return unit.apply(named_roots(roots), plan)


class Mlp(nn.Sequential):
    """Rows through two products; `change` is done to them in between."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        super().__init__(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))
        self.change: Callable[[Tensor], Tensor] | None = None
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        made = self[1](self[0](x))
        if self.change is not None:
            made = self.change(made)
        result: Tensor = self[2](made)
        return result


class Net(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.inner(x)
        return result


def gradients(net: nn.Module, x: Tensor) -> list[Tensor]:
    net.zero_grad()
    given = x.clone().requires_grad_()
    net(given).square().mean().backward()
    assert given.grad is not None
    return [given.grad, *(p.grad.clone() for p in net.parameters() if p.grad is not None)]


def assert_near(net: nn.Module, other: nn.Module, x: Tensor) -> None:
    for one, two in zip(gradients(net, x), gradients(other, x), strict=True):
        assert torch.allclose(one, two, atol=1e-6)


def counts_itself(mlp: Mlp, x: Tensor) -> Tensor:
    mlp.seen += 1
    return x * mlp.seen


MIXES: dict[str, Callable[[Mlp, Tensor], Tensor]] = {
    "mixes rows": lambda _, x: x - x.mean(0, keepdim=True),
    "writes state": counts_itself,
    "draws": lambda _, x: x + torch.randint(3, x.shape[:1])[:, None],
}


@pytest.mark.parametrize("change", MIXES)
@pytest.mark.parametrize("name", ["micro_batch", "split_matmul"])
def test_parts_give_way_to_rows_that_interact(
    name: str, change: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[str] = []
    monkeypatch.setattr(notices, "_SAID", set())
    monkeypatch.setattr(notices, "listeners", [lambda _, said: told.append(said)])
    net = Net(Mlp())
    twin = copy.deepcopy(net)
    applied(name, "Net.inner", net, parts=4)
    x = torch.randn(8, 8)
    assert_near(net, twin, x)
    for one in (net, twin):
        inner: Any = one.inner
        inner.change = functools.partial(MIXES[change], inner)
    for _ in range(2):
        results = []
        for one in (net, twin):
            torch.manual_seed(1)
            results.append((gradients(one, x), one.inner.seen.clone(), torch.rand(())))
        for a, b in zip(results[0][0], results[1][0], strict=True):
            assert torch.allclose(a, b, atol=1e-6)
        assert results[0][1:] == results[1][1:]
    assert any("runs without the plan" in said for said in told)


def test_rows_that_use_a_tensor_from_outside_stop() -> None:
    net = Net(Mlp())
    applied("split_matmul", "Net.inner", net, parts=4)
    factor = torch.ones((), requires_grad=True)
    inner: Any = net.inner
    inner.change = lambda x: x * factor
    with pytest.raises(ApplyFailed, match="uses a tensor from outside"):
        gradients(net, torch.randn(8, 8))
    assert factor.grad is None


@pytest.mark.parametrize("name", ["recompute", "chunked_loss"])
def test_weights_that_get_other_memory_before_backward_stop_the_run(name: str) -> None:
    net = Net(nn.Linear(8, 5))
    applied(name, "Net.inner", net, **({"rows": 2, "classes": 5} if name == "chunked_loss" else {}))
    x = torch.randn(6, 8, requires_grad=True)
    made = net(x)
    weight: Any = net.inner.weight
    weight.data = weight.data * 2
    with pytest.raises(ApplyFailed, match=r"weights or its input changed|`weight` was written to"):
        torch.nn.functional.cross_entropy(made, torch.zeros(6, dtype=torch.int64)).backward()


def test_a_sequential_with_other_modules_runs_without_the_plan(
    capsys: pytest.CaptureFixture[str],
) -> None:
    torch.manual_seed(0)
    chain = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))
    twin = copy.deepcopy(chain)
    applied("recompute", "Sequential[1:3]", chain)
    assert_near(chain, twin, torch.randn(4, 8))
    seen: list[int] = []
    for one in (chain, twin):
        one.insert(1, Mlp())
        one[1].change = lambda x: (seen.append(1), x)[1]
        assert_near(one, one, torch.randn(4, 8))
        assert len(seen) == 2
        seen.clear()
    assert_near(chain, twin, torch.randn(4, 8))
    del chain[2:], twin[2:]
    assert_near(chain, twin, torch.randn(4, 8))
    assert "has other modules now" in capsys.readouterr().err


def test_backward_hooks_on_a_chunked_head_get_its_logits() -> None:
    for hooked in ("net", "head"):
        net = Net(nn.Linear(8, 5))
        applied("chunked_loss", "Net.inner", net, rows=2, classes=5)
        seen: list[Tensor] = []
        owner = net if hooked == "net" else net.inner
        owner.register_full_backward_hook(lambda _m, _i, o, seen=seen: seen.append(o[0]))
        logits = net(torch.randn(6, 8, requires_grad=True))
        torch.nn.functional.cross_entropy(logits, torch.zeros(6, dtype=torch.int64)).backward()
        assert [tuple(one.shape) for one in seen] == [(6, 5)]


def conv_net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2))


def test_a_held_or_retained_input_of_a_norm_is_not_overwritten() -> None:
    net, twin, x = conv_net(), conv_net(), torch.randn(4, 3, 8, 8)
    applied("split_channels", "Sequential[1:4]", net, parts=2, overwrites=True)
    for _ in range(2):
        assert all(map(torch.equal, gradients(net, x), gradients(twin, x)))
    held: list[list[Tensor]] = []
    for one in (net, twin):
        kept: list[Tensor] = []
        hook = one[0].register_forward_hook(lambda _m, _i, o, kept=kept: kept.append(o.detach()))
        gradients(one, x)
        held.append(kept)
        hook.remove()
    assert torch.equal(held[0][0], held[1][0])
    sums = []
    for one in (net, twin):
        one.zero_grad()
        loss = one(x).sum()
        loss.backward(retain_graph=True)
        loss.backward()
        sums.append(one[0].weight.grad.clone())
    assert torch.equal(*sums)


def test_a_hook_in_a_range_of_channels_sees_all_of_them() -> None:
    net, shapes = conv_net(), []
    applied("split_channels", "Sequential[1:4]", net, parts=2, overwrites=True)
    x = torch.randn(4, 3, 8, 8)
    gradients(net, x)
    net[2].register_forward_hook(lambda _m, _i, o: shapes.append(o.shape[1]))
    gradients(net, x)
    assert shapes == [8]


def test_a_copy_of_an_overwriting_module_keeps_its_own_setting() -> None:
    net = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
    applied("overwrite", "Sequential.1", net)
    gradients(net, torch.randn(4, 8))
    assert not net[1].inplace
    assert not copy.deepcopy(net)[1].inplace


Steps = Callable[[torch.optim.Optimizer], Any]
HOOKS: dict[str, Steps] = {
    "counts": lambda opt: opt.register_step_post_hook(lambda *_: COUNTED.append(1)),
    "lowers the rate": lambda opt: opt.register_step_post_hook(
        lambda one, *_: [g.update(lr=g["lr"] * 0.5) for g in one.param_groups]
    ),
    "reads state": lambda opt: opt.register_step_pre_hook(
        lambda one, *_: COUNTED.extend(v["exp_avg"].shape for v in one.state.values())
    ),
}
COUNTED: list[Any] = []
CHANGED: dict[str, dict[str, Any]] = {
    "plain_optimizer": {"style": "chunks", "chunk_bytes": 64},
    "offload_optimizer": {"chunk_bytes": 64},
    "low_bit_states": {"states": "bf16"},
}


@pytest.mark.parametrize("hook", HOOKS)
@pytest.mark.parametrize("name", CHANGED)
def test_step_hooks_that_come_late_see_whole_steps(name: str, hook: str) -> None:
    if name == "low_bit_states":
        pytest.importorskip("torchao")
    found = []
    for planned in (True, False):
        COUNTED.clear()
        with emulate():
            torch.manual_seed(0)
            net = nn.Sequential(nn.Linear(80, 80), nn.Linear(80, 80)).cuda()
            opt = torch.optim.AdamW(net.parameters(), 1e-2, foreach=True)
            unit: Any = technique(name)
            plan = Technique(name=name, where=("AdamW",), options=CHANGED[name])
            if planned:
                unit.apply({"AdamW": opt}, plan)
            elif name == "low_bit_states":
                unit.by_hand({"AdamW": opt}, plan)
            for step in range(6):
                if step == 3:
                    HOOKS[hook](opt)
                opt.zero_grad()
                net(torch.ones(4, 80).cuda()).square().mean().backward()
                opt.step()
            found.append((net.state_dict(), list(COUNTED), opt.param_groups[0]["lr"]))
    assert found[0][1:] == found[1][1:]
    for key, value in found[0][0].items():
        assert torch.equal(value, found[1][0][key])


def test_a_fused_step_gives_way_to_sparse_gradients() -> None:
    left = []
    for planned in (True, False):
        torch.manual_seed(0)
        net = nn.Embedding(8, 4)
        opt = torch.optim.SGD(net.parameters(), 0.1)
        if planned:
            applied("plain_optimizer", "SGD", opt, style="fused")
        for sparse in (False, True):
            net.sparse = sparse
            net(torch.arange(4)).square().mean().backward()
            opt.step()
            opt.zero_grad()
        left.append(net.weight.detach().clone())
    assert torch.allclose(*left)


def test_a_hook_that_changes_the_rate_while_it_is_scaled_stops() -> None:
    net = nn.Linear(4, 4)
    opt = torch.optim.SGD(net.parameters(), 0.1)
    applied("scale_lr", "SGD", opt, from_batch=8, to_batch=16, rule="linear", warmup=0)
    HOOKS["lowers the rate"](opt)
    net(torch.randn(2, 4)).sum().backward()
    with pytest.raises(ApplyFailed, match="a step hook changed `lr`"):
        opt.step()
    assert opt.param_groups[0]["lr"] == 0.1


def test_gradients_that_are_zeroed_in_place_later_become_zeros() -> None:
    left = []
    for planned in (True, False):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4))
        opt = torch.optim.SGD(net.parameters(), 0.1, momentum=0.9)
        if planned:
            applied("optimizer_in_backward", "SGD", opt, backwards=1)
        for step in range(6):
            net(torch.ones(2, 8)).square().mean().backward()
            opt.step()
            opt.zero_grad(set_to_none=step < 3)
        assert net[0].weight.grad is not None
        assert not net[0].weight.grad.any()
        left.append(net.state_dict())
    assert all(torch.equal(left[0][key], left[1][key]) for key in left[0])


def test_a_graph_that_is_kept_later_leaves_updates_to_step() -> None:
    left = []
    for planned in (True, False):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4))
        opt = torch.optim.SGD(net.parameters(), 0.1, momentum=0.9)
        if planned:
            applied("optimizer_in_backward", "SGD", opt, backwards=1)
        for step in range(6):
            opt.zero_grad()
            loss = net(torch.ones(2, 8)).square().mean()
            if step >= 3:
                loss.backward(retain_graph=True)
            loss.backward()
            opt.step()
        left.append(net.state_dict())
    assert all(torch.equal(left[0][key], left[1][key]) for key in left[0])


def test_the_number_of_a_freed_buffer_names_no_other_storage() -> None:
    module = nn.Module()
    module.register_buffer("mean", torch.zeros(64, 64))
    exempt = _storages_of(module)
    del module
    assert not any(torch.zeros(64, 64).untyped_storage()._cdata in exempt for _ in range(64))


@pytest.mark.parametrize("of", ["saved", "compute"])
def test_a_copy_keeps_its_precision(of: str) -> None:
    planned, by_hand = Net(Mlp()), Net(Mlp())
    applied("precision", "Net", planned, of=of, dtype="bfloat16")
    unit: Any = technique("precision")
    plan = Technique(name="precision", where=("Net",), options={"of": of, "dtype": "bfloat16"})
    unit.by_hand(named_roots([by_hand]), plan)
    x = torch.randn(8, 8)
    copies = [copy.deepcopy(copy.deepcopy(copy.copy(one))) for one in (planned, by_hand)]
    with torch.no_grad():
        for one in (planned, by_hand):
            one.inner[0].weight.zero_()
    rounded, expected = (gradients(one, x) for one in copies)
    assert all(map(torch.equal, rounded, expected))
    exact = Net(Mlp())
    assert not all(map(torch.equal, rounded, gradients(exact, x)))
    assert copies[0].inner[0].weight is not planned.inner[0].weight
    assert isinstance(torch.jit.script(copies[0].inner[0]), torch.jit.ScriptModule)


CALLS: dict[str, Callable[[nn.Module, Tensor], Tensor]] = {
    "with computed parameters": lambda net, x: torch.func.functional_call(
        net, {name: one * 1.01 for name, one in net.named_parameters()}, x
    ),
    "in a checkpoint": lambda net, x: checkpoint(net, x, use_reentrant=False),
    "with own hooks": lambda net, x: _counting(net, x),
}


def _counting(net: nn.Module, x: Tensor) -> Tensor:
    with torch.autograd.graph.saved_tensors_hooks(torch.Tensor.clone, lambda kept: kept):
        made: Tensor = net(x)
    return made


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("name", ["micro_batch", "recompute", "replay", "split_matmul"])
def test_modules_that_are_called_otherwise_later_compute_the_same(name: str, call: str) -> None:
    class Called(Net):
        how: Callable[[nn.Module, Tensor], Tensor] = staticmethod(lambda net, x: net(x))

        def forward(self, x: Tensor) -> Tensor:
            return self.how(self.inner, x)

    net, x = Called(Mlp()), torch.randn(8, 8)
    twin = copy.deepcopy(net)
    where = "Called.inner:addmm.0,relu.0" if name == "replay" else "Called.inner"
    applied(name, where, net, **({"parts": 4} if name in ("micro_batch", "split_matmul") else {}))
    for how in (Called.how, CALLS[call], CALLS[call]):
        Called.how = staticmethod(how)
        assert_near(net, twin, x)


@pytest.mark.parametrize("name", ["micro_batch", "split_matmul"])
@pytest.mark.parametrize("late", [False, True])
def test_hooks_on_a_parameter_see_its_whole_gradient_once(name: str, late: bool) -> None:
    seen: list[list[Tensor]] = []
    for planned in (False, True):
        net, got = Net(Mlp()), []
        if planned:
            applied(name, "Net.inner", net, parts=4)
        gradients(net, X)
        net.zero_grad()
        made = net(X) if late else None
        weight: Any = net.inner[0].weight
        weight.register_hook(lambda grad, got=got: (got.append(grad), grad * 0.5)[1])
        stops = planned and late and name == "micro_batch"
        said = pytest.raises(ApplyFailed, match="came to have gradient hooks")
        with said if stops else contextlib.nullcontext():
            (net(X) if made is None else made).square().mean().backward()
        seen.append([] if stops else [*got, weight.grad])
    assert len(seen[0]) == 2
    assert not seen[1] or all(map(torch.allclose, *seen))


X = torch.linspace(-1, 1, 64).view(8, 8)


def test_what_a_replay_reads_again_may_not_be_written_in_between() -> None:
    class Shifted(nn.Linear):
        def __init__(self) -> None:
            super().__init__(8, 8)
            self.register_buffer("mean", torch.zeros(8))

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * (1 + self.mean)

    net, x = Shifted(), torch.randn(4, 8)
    applied("replay", "Shifted:add.0", net)
    gradients(net, x)
    made = net(x).sum()
    net.mean.add_(1)
    with pytest.raises(ApplyFailed, match="between a forward and its backward"):
        made.backward()


def test_what_no_check_sees_is_named() -> None:
    one = Technique(name="recompute", where=("Net",))
    assert any("environment" in said for said in unseen_by(one))
