"""Mistakes of others' offload that were made in public: a copy of each shows, ours has none.

The races are in `tests/emulator/test_orders.py`.
"""

from __future__ import annotations

import gc
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from bench.offload import every
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import torchtrim
from steps import Rereading, squared
from torchtrim.analysis.prices import device_of
from torchtrim.capture.workload import TrainStep
from torchtrim.emulator import emulate
from torchtrim.executor.roles import OperatorOrdinal
from torchtrim.records.plan import Technique
from torchtrim.step.from_profile import on_device, step_of
from torchtrim.step.simulate import simulate
from torchtrim.techniques.offload_activations.places import place_of
from torchtrim.techniques.offload_activations.technique import TECHNIQUE
from torchtrim.techniques.offload_activations.watching import OffloadWatcher
from torchtrim.techniques.offload_activations.windows import edit_of
from torchtrim.techniques.offload_optimizer.technique import TECHNIQUE as OF_OPTIMIZER


def tower(layers: int = 4) -> nn.Sequential:
    torch.manual_seed(0)
    inner = [part for _ in range(layers) for part in (nn.Linear(32, 32), nn.GELU())]
    return nn.Sequential(*inner).cuda()


def offloaded(model: nn.Sequential, batch: torch.Tensor) -> Any:
    """The model with all that can be offloaded."""
    optimizer = torch.optim.SGD(model.parameters(), 1e-2)
    profile = torchtrim.record(TrainStep(model, squared, optimizer, batch))
    step = on_device(step_of(profile), device_of(profile))
    where = tuple(option.where for option in TECHNIQUE.options(step) if ":gelu." in option.where)
    planned = TECHNIQUE.settled(step, Technique(name=TECHNIQUE.name, where=where))
    return TECHNIQUE.apply({"Sequential": model}, planned)


class Stash:
    """huggingface/trl#5700: what was packed is forgotten as it is unpacked, and never if nobody asks."""

    def __init__(self) -> None:
        self.side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        self.kept: dict[int, Any] = {}
        self.numbers = itertools.count()

    def pack(self, tensor: torch.Tensor) -> Any:
        number = next(self.numbers)
        host = torch.empty_like(tensor, device="cpu", pin_memory=True)
        self.side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.side):
            host.copy_(tensor, non_blocking=True)
        self.kept[number] = tensor, self.side.record_event()
        return number, host

    def unpack(self, packed: Any) -> torch.Tensor:
        number, host = packed
        _, done = self.kept.pop(number, (None, None))
        if done is not None:
            torch.cuda.current_stream().wait_event(done)
        return host.cuda()  # type: ignore[no-any-return]


def held_after(forward: Callable[[nn.Module, torch.Tensor], torch.Tensor]) -> list[int]:
    """Bytes that are left after each of some steps whose second branch no loss asks for."""
    model, batch = tower(), torch.randn(1024, 32, device="cuda")
    seen = []
    for _ in range(4):
        loss = forward(model, batch)
        unused = forward(model, batch)
        loss.backward()  # type: ignore[no-untyped-call]
        model.zero_grad()
        del loss, unused
        gc.collect()
        torch.cuda.synchronize()
        seen.append(torch.cuda.memory_allocated())
    return seen


def test_what_nobody_asks_for_is_let_go() -> None:
    with emulate(streams="late"):
        stash = Stash()

        def leaking(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
            with torch.autograd.graph.saved_tensors_hooks(stash.pack, stash.unpack):
                return squared(model, batch)

        seen = held_after(leaking)
        assert seen == sorted(set(seen))
    with emulate(streams="late") as emulation:
        applied: list[Any] = []

        def ours(model: Any, batch: torch.Tensor) -> torch.Tensor:
            if not applied:
                applied.append(offloaded(model, batch))
                model.zero_grad()
            return squared(model, batch)

        seen = held_after(ours)
        assert len(set(seen)) == 1
        assert emulation.orders is not None
        assert emulation.orders.races() == []


def test_what_leaves_by_an_exception_leaves_nothing() -> None:
    """The other half of huggingface/trl#5700: the context ends, and copies are under way."""
    with emulate(streams="late"):
        model, batch = tower(), torch.randn(1024, 32, device="cuda")
        offloaded(model, batch)
        model.zero_grad()
        failing = model[6].register_forward_pre_hook(lambda *_: 1 / 0)
        seen = []
        for _ in range(3):
            with pytest.raises(ZeroDivisionError):
                model(batch)
            gc.collect()
            seen.append(torch.cuda.memory_allocated())
        failing.remove()
        assert len(set(seen)) == 1


class NoOptimizer:
    """pytorch/ao#959: it steps, and is no Optimizer."""

    def __init__(self, parameters: Any, **options: Any) -> None:
        self.optimizers = [torch.optim.AdamW([one], **options) for one in parameters]
        self.param_groups = [group for one in self.optimizers for group in one.param_groups]

    def step(self) -> None:
        for one in self.optimizers:
            one.step()


def test_a_scheduler_takes_the_optimizer() -> None:
    with emulate(streams="late"):
        broken: Any = NoOptimizer(tower().parameters(), lr=1e-3)
        assert not hasattr(broken, "defaults")
        with pytest.raises(TypeError, match="not an Optimizer"):
            torch.optim.lr_scheduler.LambdaLR(broken, lambda step: 0.5**step)
    left = []
    for order in ("", "late"):
        with emulate(streams=order):
            model = tower()
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
            if order:
                options: Any = {"chunk_bytes": 5000}
                where = Technique(name=OF_OPTIMIZER.name, where=("O",), options=options)
                OF_OPTIMIZER.apply({"O": optimizer}, where)
            assert optimizer.defaults["lr"] == 1e-3
            scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
            torch.manual_seed(1)
            for _ in range(3):
                squared(model, torch.randn(8, 32, device="cuda")).backward()  # type: ignore[no-untyped-call]
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            left.append([one.detach().cpu() for one in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*left, strict=True))


def hooked(parameters: Any) -> None:
    """pytorch/ao#1209: a hook on every parameter, whether or not it gets a gradient."""
    for one in parameters:
        one.register_post_accumulate_grad_hook(lambda _: None)


def test_a_frozen_parameter_is_none_of_its_business() -> None:
    left = []
    for order in ("", "late"):
        with emulate(streams=order):
            model = tower()
            model[0].requires_grad_(False)
            with pytest.raises(RuntimeError, match="gradient"):
                hooked(model.parameters())
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
            if order:
                options: Any = {"chunk_bytes": 5000}
                where = Technique(name=OF_OPTIMIZER.name, where=("O",), options=options)
                OF_OPTIMIZER.apply({"O": optimizer}, where)
            torch.manual_seed(1)
            for _ in range(3):
                squared(model, torch.randn(8, 32, device="cuda")).backward()  # type: ignore[no-untyped-call]
                optimizer.step()
                optimizer.zero_grad()
            assert model[0].weight not in dict(optimizer.state)
            left.append([one.detach().cpu() for one in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*left, strict=True))


def widening() -> nn.Sequential:
    """Each layer's result has a size of its own."""
    torch.manual_seed(0)
    widths = [16, 24, 32, 40, 48, 56, 64]
    inner = [part for a, b in itertools.pairwise(widths) for part in (nn.Linear(a, b), nn.GELU())]
    return nn.Sequential(*inner).cuda()


def test_the_layers_that_are_offloaded_are_those_of_the_plan(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """NVIDIA/TransformerEngine#1959: the number of a group is taken for that of a layer."""

    def workload() -> TrainStep:
        model = widening()
        batch = torch.randn(1024, 16, device="cuda")
        return TrainStep(model, squared, torch.optim.SGD(model.parameters(), 1e-2), batch)

    with emulate():
        profile = torchtrim.record(workload())
    step = on_device(step_of(profile), device_of(profile))
    places = [where for where in every(step) if ":gelu." in where]
    chosen = tuple(sorted(places, key=lambda where: place_of(where).made.ordinal)[1::2])
    edits = [edit for where in chosen if (edit := edit_of(step, place_of(where)))]
    predicted = simulate(step, edits).peak_bytes

    def peak() -> int:
        with emulate(streams="late"):
            work = workload()
            planned = TECHNIQUE.settled(step, Technique(name=TECHNIQUE.name, where=chosen))
            TECHNIQUE.apply({"Sequential": work.model}, planned)
            work.step(0)
            torch.cuda.reset_peak_memory_stats()
            work.step(0)
            return torch.cuda.max_memory_allocated()

    assert peak() == pytest.approx(predicted, rel=0.01)
    own = OffloadWatcher.__init__

    def mixed_up(self: OffloadWatcher, *args: Any) -> None:
        own(self, *args)
        groups = sorted(self._made)
        self._made = {
            OperatorOrdinal(run.name, group): self._made[run] for group, run in enumerate(groups)
        }  # type: ignore[assignment]

    monkeypatch.setattr(OffloadWatcher, "__init__", mixed_up)
    assert peak() != pytest.approx(predicted, rel=0.01)


class Product(nn.Linear):
    """A linear layer by `Rereading`."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return Rereading.apply(input, self.weight)  # type: ignore[no-any-return, no-untyped-call]


class Fetches(TorchDispatchMode):
    """Counts the bytes that are copied from the host to the device."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.copy_.default and args[1].device.type == "cpu":
            self.bytes += args[1].nbytes * (args[0].device.type == "cuda")
        elif func is torch.ops.aten._to_copy.default and args[0].device.type == "cpu":
            self.bytes += result.nbytes * (result.device.type == "cuda")
        return result


def fetched_by_backward(loss: torch.Tensor) -> int:
    """Bytes that backward copies to the device."""
    with Fetches() as fetches:
        loss.backward()  # type: ignore[no-untyped-call]
    return fetches.bytes


def test_what_backward_asks_for_twice_is_fetched_once() -> None:
    """NVIDIA/TransformerEngine#1807: each look at the saved tensors unpacks all of them again."""

    def model() -> nn.Sequential:
        torch.manual_seed(0)
        inner = [p for _ in range(4) for p in (Product(32, 32, bias=False), nn.GELU())]
        return nn.Sequential(*inner).cuda()

    def gradients(of: nn.Sequential) -> list[torch.Tensor]:
        return [one.grad.cpu() for one in of.parameters() if one.grad is not None]

    with emulate(streams="late"):
        batch = torch.randn(1024, 32, device="cuda")
        plain, stashed, ours = model(), model(), model()
        squared(plain, batch).backward()
        stash = Stash()
        with torch.autograd.graph.saved_tensors_hooks(stash.pack, stash.unpack):
            loss = squared(stashed, batch)
        assert fetched_by_backward(loss) > 2 * 4 * batch.nbytes
        handle = offloaded(ours, batch)
        squared(ours, batch).backward()
        for one in ours.parameters():
            one.grad = None
        assert fetched_by_backward(squared(ours, batch)) <= 4 * batch.nbytes
        handle.revert()
        found = [gradients(one) for one in (plain, ours)]
    assert len(found[0]) == 4
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
