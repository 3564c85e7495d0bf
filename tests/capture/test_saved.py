from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from capture.loops import record, trained
from models import SAMPLES
from torchtrim.capture.recording import record_call
from torchtrim.capture.saved import SavedTensors
from torchtrim.records.profile import Profile, SavedTensor, Storage, check


def by_saver(profile: Profile) -> dict[str, list[SavedTensor]]:
    found: dict[str, list[SavedTensor]] = {}
    for saved in profile.saved:
        name = profile.operators[saved.saver].name if saved.saver >= 0 else ""
        found.setdefault(name, []).append(saved)
    return found


def recorded(function: Callable[[], Any]) -> Profile:
    profile = record_call(function, device="cpu")
    assert check(profile) is None
    assert profile.saved_known
    return profile


@contextlib.contextmanager
def unread(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with monkeypatch.context() as patch:
        patch.setattr(SavedTensors, "read", lambda *_: None)
        yield


def made_and_before(profile: Profile) -> tuple[list[Storage], list[Storage]]:
    """Storages made in the step, in order; those from before are found in the collector's order."""
    made = [storage for storage in profile.storages if storage.birth >= 0]
    before = [storage for storage in profile.storages if storage.birth < 0]
    return made, sorted(before, key=str)


@pytest.mark.parametrize("name", sorted(SAMPLES))
def test_storages_live_as_long_as_without(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    read = trained(SAMPLES[name]())
    torch.manual_seed(0)
    with unread(monkeypatch):
        plain = trained(SAMPLES[name]())
    assert read.saved
    assert not plain.saved
    assert made_and_before(read) == made_and_before(plain)
    assert [op.name for op in read.operators] == [op.name for op in plain.operators]
    assert read.tracked_peak_bytes == plain.tracked_peak_bytes


@pytest.mark.parametrize("name", sorted(SAMPLES.keys() - {"checkpointed"}))
def test_what_backward_reads_was_saved(name: str) -> None:
    """A gradient reads what is older than backward only if its forward operator's node saved it.

    Inside a checkpoint the nodes keep what its own hooks packed.
    """
    profile = trained(SAMPLES[name]())
    start = next(i for i, op in enumerate(profile.operators) if op.phase == "backward")
    kept = {(saved.saver, saved.storage) for saved in profile.saved}
    for index, op in enumerate(profile.operators):
        if op.phase == "backward" and op.forward >= 0:
            for use in op.inputs:
                if profile.storages[use.storage].birth < start:
                    assert (op.forward, use.storage) in kept, (index, op.name)


def test_inputs_are_saved_before_the_operator_and_results_after() -> None:
    layer = nn.Linear(4, 4)

    def step() -> None:
        layer(torch.ones(3, 4)).sigmoid().sum().backward()

    profile = recorded(step)
    found = by_saver(profile)
    (batch,) = found["aten::addmm.default"]
    assert batch.packed == batch.saver - 1
    assert (batch.shape, batch.strides, batch.offset, batch.dtype) == (
        (3, 4),
        (4, 1),
        0,
        "float32",
    )
    (result,) = found["aten::sigmoid.default"]
    assert result.packed == result.saver
    assert profile.storages[result.storage].birth == result.saver
    for saved in (batch, result):
        assert saved.asked == 1
        assert profile.operators[saved.unpacked].phase == "backward"
        assert all(
            op.forward != saved.saver for op in profile.operators[saved.saver : saved.unpacked]
        )
    assert profile.operators[batch.unpacked].forward == batch.saver


def test_a_view_has_its_own_geometry() -> None:
    weight = torch.ones(4, 6, requires_grad=True)
    whole = torch.ones(4, 12)
    profile = recorded(lambda: (weight * whole[1:, 3:9].repeat(2, 1)[:4]).sum().backward())
    saved = by_saver(profile)["aten::mul.Tensor"]
    assert [(one.shape, one.strides, one.offset) for one in saved] == [((4, 6), (6, 1), 0)]
    profile = recorded(lambda: (weight[1:] * whole[1:, 3:9]).sum().backward())
    saved = by_saver(profile)["aten::mul.Tensor"]
    assert ((3, 6), (12, 1), 15) in [(one.shape, one.strides, one.offset) for one in saved]


def test_a_tensor_saved_twice_is_there_twice() -> None:
    x = torch.ones(4, requires_grad=True)

    def step() -> None:
        y = x * 2
        (y * y).sum().backward()

    saved = by_saver(recorded(step))["aten::mul.Tensor"]
    assert len(saved) == 2
    assert len({one.storage for one in saved}) == 1


def test_what_backward_never_asks_for() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Sigmoid())
    profile = recorded(
        lambda: model(torch.ones(2, 4)) and None if False else model(torch.ones(2, 4))
    )
    assert len(profile.saved) == 2
    assert {(one.unpacked, one.asked) for one in profile.saved} == {(-1, 0)}


def test_a_graph_that_is_kept_is_asked_twice() -> None:
    layer = nn.Linear(4, 4)

    def step() -> None:
        loss = layer(torch.ones(2, 4)).sigmoid().sum()
        loss.backward(retain_graph=True)
        loss.backward()

    assert {one.asked for one in recorded(step).saved} == {2}


def test_gradients_of_gradients() -> None:
    layer = nn.Linear(4, 1)

    def step() -> None:
        x = torch.ones(2, 4, requires_grad=True)
        (slope,) = torch.autograd.grad(layer(x).tanh().sum(), x, create_graph=True)
        slope.square().sum().backward()

    profile = recorded(step)
    found = by_saver(profile)
    (result,) = found["aten::tanh.default"]
    assert result.asked == 2
    assert {one.storage for one in found["aten::tanh_backward.default"]} >= {result.storage}
    assert all(
        profile.operators[one.saver].phase == "backward"
        for one in found["aten::tanh_backward.default"]
    )


class Swish(torch.autograd.Function):
    """Saves an input, what it made on the way and its output."""

    seen: list[Any] = []

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        gate = torch.sigmoid(x)
        out = x * gate
        ctx.save_for_backward(x, gate, out)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        x, gate, out = ctx.saved_tensors
        Swish.seen = [x]
        return grads[0] * (gate + out * (1 - gate))


def test_a_function_of_the_scripts_own_saves_when_it_is_done() -> None:
    layer = nn.Linear(4, 4)
    profile = recorded(lambda: Swish.apply(layer(torch.ones(2, 4))).sum().backward())
    saved = by_saver(profile)["aten::sigmoid.default"]
    names = [profile.operators[profile.storages[one.storage].birth].name for one in saved]
    assert names == ["aten::addmm.default", "aten::sigmoid.default", "aten::mul.Tensor"]
    assert {profile.operators[one.packed].name for one in saved} == {"aten::mul.Tensor"}


def test_a_function_gets_the_very_tensor_that_it_saved() -> None:
    weight = nn.Parameter(torch.ones(4))
    weight.main_grad = "its own"  # type: ignore[attr-defined]
    recorded(lambda: Swish.apply(weight).sum().backward())
    assert Swish.seen[0] is weight


def test_a_checkpoint_packs_for_itself() -> None:
    inside, outside = nn.Sequential(nn.Linear(4, 4), nn.Sigmoid()), nn.Linear(4, 4)

    def step() -> None:
        x = torch.ones(2, 4, requires_grad=True)
        outside(checkpoint(inside, x, use_reentrant=False)).sum().backward()

    profile = recorded(step)
    assert {profile.module_of(one.saver) for one in profile.saved} == {"Linear"}


def test_hooks_of_the_script_are_called_once_for_each_tensor() -> None:
    layer = nn.Linear(4, 4)
    calls: list[str] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        calls.append("pack")
        return tensor

    def unpack(tensor: torch.Tensor) -> torch.Tensor:
        calls.append("unpack")
        return tensor

    def step() -> None:
        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            out = layer(torch.ones(2, 4))
        out.sum().backward()

    assert recorded(step).saved == []
    assert calls == ["pack", "unpack"]


def test_nodes_that_show_nothing_are_told_by_what_they_read() -> None:
    """What is written into a view belongs to a node that hides the real one."""
    weight = torch.ones(4, 4, requires_grad=True)
    mask = torch.ones(4)

    def step() -> None:
        x = weight * 2
        x[:, 0].mul_(mask)
        x.sum().backward()

    profile = recorded(step)
    held = [one for one in profile.saved if profile.storages[one.storage].bytes == mask.nbytes]
    assert held
    assert all(profile.operators[one.unpacked].phase == "backward" for one in held)


def test_function_transforms_run() -> None:
    layer = nn.Linear(4, 1)
    weights = dict(layer.named_parameters())
    x = torch.ones(2, 4)

    def loss(weights: dict[str, torch.Tensor]) -> torch.Tensor:
        return torch.func.functional_call(layer, weights, (x,)).tanh().sum()

    def step() -> None:
        torch.func.grad(loss)(weights)
        torch.func.vmap(torch.func.grad(lambda row: row.sin().sum()))(x)
        torch.func.hessian(lambda row: row.sin().sum())(x[0])
        layer(x).sum().backward()

    assert by_saver(recorded(step))["aten::addmm.default"]


def test_what_was_written_in_place_is_still_found_out() -> None:
    x = torch.ones(4, requires_grad=True)

    def step() -> None:
        y = x.exp()
        y.add_(1)
        y.sum().backward()

    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        recorded(step)
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        recorded(lambda: [loss.backward() for loss in [Swish.apply(x).sum()] * 2])
    assert torch.autograd.graph._engine_run_backward.__module__ == "torch.autograd.graph"
    assert torch.autograd._engine_run_backward is torch.autograd.graph._engine_run_backward  # type: ignore[attr-defined]


def test_anomaly_mode_and_other_threads() -> None:
    layer = nn.Linear(4, 4)

    def elsewhere() -> None:
        layer(torch.ones(2, 4)).sum().backward()

    def step() -> None:
        with torch.autograd.detect_anomaly(check_nan=True):
            layer(torch.ones(2, 4)).sum().backward()
        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()

    with pytest.warns(UserWarning, match="Anomaly"):
        profile = recorded(step)
    assert len(by_saver(profile)["aten::addmm.default"]) == 1


def test_the_next_steps_are_as_they_were() -> None:
    def steps(watched: bool) -> list[torch.Tensor]:
        torch.manual_seed(0)
        sample = SAMPLES["encoder"]()
        optimizer = torch.optim.Adam(sample.model.parameters(), 1e-3)

        def step() -> None:
            sample.loss().backward()
            optimizer.step()
            optimizer.zero_grad()

        for number in range(4):
            if watched and number == 1:
                recorded(step)
            else:
                step()
        return [parameter.detach() for parameter in sample.model.parameters()]

    for one, other in zip(steps(watched=True), steps(watched=False), strict=True):
        assert torch.equal(one, other)


def test_random_operators_are_told() -> None:
    def step() -> None:
        x = torch.ones(8, requires_grad=True)
        y = nn.functional.dropout(x) + torch.randn(8) + torch.rand_like(x)
        torch.multinomial(x.detach(), 2)
        y.sum().backward()

    profile = recorded(step)
    random = {op.name for op in profile.operators if op.random}
    assert {"aten::randn.default", "aten::rand_like.default", "aten::multinomial.default"} <= random
    assert random & {"aten::native_dropout.default", "aten::bernoulli_.float"}
    plain = {op.name for op in profile.operators if not op.random}
    assert {"aten::add.Tensor", "aten::sum.default"} <= plain


def test_a_recording_of_a_loop_has_them_too() -> None:
    sample = SAMPLES["mlp"]()
    optimizer = torch.optim.SGD(sample.model.parameters(), 0.1)

    def loop() -> None:
        for _ in range(3):
            sample.loss().backward()
            optimizer.step()
            optimizer.zero_grad()

    profile = record(loop)
    assert profile.saved
    assert all(one.saver >= 0 and one.unpacked >= 0 for one in profile.saved)


def test_what_only_a_saved_wrapper_refers_to_is_not_kept_by_python() -> None:
    model = nn.Sequential(nn.Linear(3, 8), nn.GELU(), nn.Linear(8, 3))
    parts = [torch.randn(2, 3), torch.randn(4, 3)]
    ragged = torch.nested.nested_tensor(parts, layout=torch.jagged)
    held = []

    def step(holds: bool) -> None:
        inner = model[1](model[0](ragged))
        held[:] = [inner] if holds else []
        inner = model[2](inner)
        inner.values().sum().backward()

    for holds in (False, True):
        profile = recorded(lambda holds=holds: step(holds))
        begins = min(n for n, op in enumerate(profile.operators) if op.phase == "backward")
        (made,) = (op.outputs[0] for op in profile.operators if op.name.startswith("aten::gelu.d"))
        assert (profile.storages[made.storage].kept >= begins) == holds
