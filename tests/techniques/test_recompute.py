"""Recompute: equal results, exact undo, and refusals."""

from __future__ import annotations

import copy
import io
import itertools
import random

import numpy
import pytest
import torch
from torch import nn

import torchtrim
from steps import ConvNet, encoder, flat, images, squared, train_step, trial
from torchtrim.errors import ApplyFailed
from torchtrim.executor.registry import technique
from torchtrim.records.plan import Technique
from torchtrim.step.from_profile import step_of
from torchtrim.techniques.recompute.technique import TECHNIQUE


def planned(*where: str) -> Technique:
    return Technique(name="recompute", where=where)


def run(model: nn.Module, batch: torch.Tensor, steps: int = 3) -> list[torch.Tensor]:
    """All that three steps leave: losses, gradients, state, random numbers."""
    optimizer = torch.optim.AdamW(model.parameters())
    torch.manual_seed(3)
    left = []
    for _ in range(steps):
        loss = squared(model, batch)
        loss.backward()
        left += [loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]
        optimizer.step()
        optimizer.zero_grad()
    return [*left, *(t.clone() for t in model.state_dict().values()), torch.get_rng_state()]


CASES = [
    (lambda: ConvNet(), images, ("ConvNet.blocks.0", "ConvNet.blocks.3", "ConvNet.blocks.5.norm")),
    (lambda: ConvNet(), images, ("ConvNet",)),
    (lambda: flat(), images, ("Sequential[0:4]", "Sequential[8:12]")),
    (lambda: flat(), images, ("Sequential",)),
    (lambda: encoder(), lambda: torch.randn(4, 16, 32), ("TransformerEncoder.layers.1",)),
]


@pytest.mark.parametrize(("make", "batch", "where"), CASES)
def test_every_bit_agrees(make, batch, where) -> None:
    torch.manual_seed(0)
    model = make()
    twin, x = copy.deepcopy(model), batch()
    handle = TECHNIQUE.apply({type(model).__name__: model}, planned(*where))
    assert all(map(torch.equal, run(model, x), run(twin, x)))
    handle.revert()


def test_blocks_are_planned_under_hooks_of_the_script_that_write_nothing() -> None:
    step = train_step(ConvNet(), images())
    packed = []
    for pack in (lambda one: one, lambda one: packed.append(1) or one):
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda one: one):
            profile = trial(step)[1]
        assert {one.hooked for one in profile.saved} == ({True} if not packed else set())
    options = {"recompute": True, "replay": False, "offload_activations": False}
    with torch.autograd.graph.saved_tensors_hooks(lambda one: one, lambda one: one):
        recorded = step_of(trial(step)[1])
        assert {one: bool(technique(one).options(recorded)) for one in options} == options
        with torchtrim.fit(step, "70%", steps=2) as fitted:
            assert "recompute" in {one.name for one in fitted.plan.techniques}
            assert fitted.certificate is not None
            assert fitted.certificate.verdict == "BITWISE"


def test_fewer_activations_are_kept() -> None:
    model, kept = ConvNet(), []
    TECHNIQUE.apply({"ConvNet": model}, planned(*(f"ConvNet.blocks.{i}" for i in range(4))))
    with torch.autograd.graph.saved_tensors_hooks(
        lambda t: kept.append(t.nbytes) or t.detach(), lambda t: t
    ):
        squared(model, images())
    plain, all_kept = ConvNet(), []
    with torch.autograd.graph.saved_tensors_hooks(
        lambda t: all_kept.append(t.nbytes) or t.detach(), lambda t: t
    ):
        squared(plain, images())
    assert sum(kept) < 0.75 * sum(all_kept)


def test_revert_leaves_what_was_there() -> None:
    model = ConvNet()
    classes = [type(m) for m in model.modules()]
    before = {name: dict(vars(m)) for name, m in model.named_modules()}
    state = {k: v.clone() for k, v in model.state_dict().items()}
    handle = TECHNIQUE.apply({"ConvNet": model}, planned("ConvNet.blocks.0", "ConvNet.blocks.4"))
    handle.revert()
    handle.revert()
    assert [type(m) for m in model.modules()] == classes
    assert {name: dict(vars(m)) for name, m in model.named_modules()} == before
    assert all(torch.equal(v, state[k]) for k, v in model.state_dict().items())


def test_state_dict_knows_nothing_of_the_plan() -> None:
    model, plain = ConvNet(), ConvNet()
    keys = list(model.state_dict())
    TECHNIQUE.apply({"ConvNet": model}, planned("ConvNet.blocks.0"))
    assert list(model.state_dict()) == keys
    plain.load_state_dict(model.state_dict())


def test_a_copy_or_pickle_is_of_the_original_class() -> None:
    model = flat()
    TECHNIQUE.apply({"Sequential": model}, planned("Sequential[0:4]"))
    assert type(copy.deepcopy(model)) is nn.Sequential
    assert isinstance(model, nn.Sequential)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    assert type(torch.load(file, weights_only=False)) is nn.Sequential
    assert type(model) is not nn.Sequential


def test_no_recompute_without_gradients() -> None:
    model = ConvNet()
    TECHNIQUE.apply({"ConvNet": model}, planned("ConvNet.blocks.0"))
    calls = itertools.count()
    model.blocks[0].conv.register_forward_hook(lambda *_: (next(calls), None)[1])
    with torch.no_grad():
        model(images())
    assert next(calls) == 1


class Power(nn.Module):
    """A layer that writes a buffer and then reads it, as spectral norm does."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.register_buffer("u", torch.ones(6))
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.u = nn.functional.normalize(self.linear.weight @ self.u, dim=0)
            self.calls += 1
        return torch.tanh(self.linear(x) * self.u)


def test_buffers_are_written_once_and_read_as_they_were() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(Power(), Power(), Power())
    twin, x = copy.deepcopy(model), torch.randn(4, 6)
    TECHNIQUE.apply({"Sequential": model}, planned("Sequential.0", "Sequential.1"))
    assert all(map(torch.equal, run(model, x), run(twin, x)))
    assert model[0].calls == 3


def test_buffers_in_a_mode_first_seen_later() -> None:
    torch.manual_seed(0)
    model = ConvNet()
    twin, x = copy.deepcopy(model), images()
    TECHNIQUE.apply({"ConvNet": model}, planned("ConvNet.blocks.0"))
    for one in (model, twin):
        one.eval()
        run(one, x, 1)
        one.train()
    assert all(map(torch.equal, run(model, x), run(twin, x)))


def test_a_forward_of_the_instance_is_kept() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Tanh())
    own = model.forward
    model.forward = lambda x: own(x) * 2
    mine, x = model.forward, torch.randn(2, 3)
    expected = model(x)
    handle = TECHNIQUE.apply({"Sequential": model}, planned("Sequential"))
    assert torch.equal(model(x), expected)
    handle.revert()
    assert model.forward is mine


def test_keyword_arguments_reach_the_block() -> None:
    class Scaled(nn.Module):
        def forward(self, x: torch.Tensor, *, by: torch.Tensor) -> torch.Tensor:
            return torch.sin(x * by).exp()

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Scaled()
            self.weight = nn.Parameter(torch.ones(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.inner(x, by=self.weight)

    model = Net()
    twin, x = copy.deepcopy(model), torch.randn(2, 3)
    TECHNIQUE.apply({"Net": model}, planned("Net.inner"))
    assert all(map(torch.equal, run(model, x), run(twin, x)))


@pytest.mark.parametrize(
    ("where", "says"),
    [
        ("ConvNet.blocks.99", "no such module"),
        ("Other.blocks.0", "no such module"),
        ("ConvNet.blocks[0:2]", "not an nn.Sequential"),
        ("[1:2]", "cannot read"),
    ],
)
def test_a_wrong_place_leaves_the_model_alone(where: str, says: str) -> None:
    model = ConvNet()
    with pytest.raises(ApplyFailed, match=says):
        TECHNIQUE.apply({"ConvNet": model}, planned("ConvNet.blocks.0", where))
    assert all(
        "forward" not in vars(type(m)) or type(m).__module__ != __name__ for m in [model.stem]
    )
    assert type(model.blocks[0]).__mro__[1] is nn.Module


def test_ranges_must_not_overlap() -> None:
    with pytest.raises(ApplyFailed, match="overlaps"):
        TECHNIQUE.apply({"Sequential": flat()}, planned("Sequential[0:4]", "Sequential[2:6]"))
    with pytest.raises(ApplyFailed, match="leaves"):
        TECHNIQUE.apply({"Sequential": flat()}, planned("Sequential[0:400]"))


def test_compiled_by_torchscript_is_refused() -> None:
    model = nn.Sequential(torch.jit.script(nn.Linear(2, 2)))
    with pytest.raises(ApplyFailed, match="TorchScript"):
        TECHNIQUE.apply({"Sequential": model}, planned("Sequential.0"))


def test_compiled_in_place_is_refused() -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    model[0].compile(backend="eager")
    with pytest.raises(ApplyFailed, match="compile"):
        TECHNIQUE.apply({"Sequential": model}, planned("Sequential.0"))


class Counting(nn.Module):
    """A layer that depends on a counter, on its mode and on the generators of Python and numpy."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.calls = 0
        self.mean = torch.zeros(6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.mean = 0.9 * self.mean + x.detach().mean(0)
        self.last = getattr(self, "last", 0) + 1
        x = (
            x * (self.calls + self.last + random.random() + float(numpy.random.rand()))
            + self.training
        )
        return torch.tanh(torch.tanh(self.linear(x)))


def test_counters_and_foreign_generators_are_as_they_were() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(Counting(), Counting())
    twin, x = copy.deepcopy(model), torch.randn(4, 6)
    TECHNIQUE.apply({"Sequential": model}, planned("Sequential.0", "Sequential.1"))
    left = []
    for one in (model, twin):
        random.seed(0)
        numpy.random.seed(0)
        left.append([*run(one, x), torch.tensor([random.random(), numpy.random.rand()])])
    assert all(map(torch.equal, *left))
    for one, other in zip(model, twin, strict=True):
        assert one.calls == one.last == other.calls == 3
        assert torch.equal(one.mean, other.mean)


def test_a_mode_that_changes_before_backward() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.5), nn.Linear(6, 6)))
    twin, x = copy.deepcopy(model), torch.randn(4, 6)
    TECHNIQUE.apply({"Sequential": model}, planned("Sequential.0"))
    gradients = []
    for one in (model, twin):
        torch.manual_seed(1)
        loss = one(x).square().sum()
        one.eval()
        loss.backward()
        assert not one[0].training
        gradients.append([p.grad for p in one.parameters()])
    assert all(map(torch.equal, *gradients))


def test_a_retained_graph_has_two_backwards() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.5), nn.Tanh()))
    twin, x = copy.deepcopy(model), torch.randn(4, 6)
    TECHNIQUE.apply({"Sequential": model}, planned("Sequential.0"))
    gradients = []
    for one in (model, twin):
        torch.manual_seed(1)
        output = one(x)
        output.square().sum().backward(retain_graph=True)
        output.sum().backward()
        gradients.append([p.grad for p in one.parameters()])
    assert all(map(torch.equal, *gradients))


class Cache:
    """Keys of the blocks before, as a decoder keeps them: each block makes it longer."""

    def __init__(self) -> None:
        self.layers: list[dict[str, torch.Tensor]] = []


class Growing(nn.Module):
    """Blocks that are given a list, and an object, that later blocks make longer."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(_Appending(8) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made, cache = [x], Cache()
        for block in self.blocks:
            made.append(block(made, cache=cache))
        return torch.stack(made).sum(0)


class _Appending(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.layer = nn.Linear(size, size)

    def forward(self, made: list[torch.Tensor], cache: Cache) -> torch.Tensor:
        key = self.layer(torch.stack(made).mean(0)).tanh()
        cache.layers.append({"key": key})
        return sum(layer["key"] for layer in cache.layers) * len(made)


def test_arguments_that_change_after_the_call_are_as_they_were() -> None:
    torch.manual_seed(0)
    model, x = Growing(), torch.randn(4, 8)
    twin = copy.deepcopy(model)
    handle = TECHNIQUE.apply(
        {"Growing": model}, planned(*(f"Growing.blocks.{i}" for i in range(3)))
    )
    assert all(map(torch.equal, run(model, x), run(twin, x)))
    handle.revert()


def test_a_call_whose_graph_is_thrown_away_bars_no_range() -> None:
    """As a generator's for its discriminator: only its result is saved, by what reads it."""

    def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        aside = model(batch).detach()
        return model(batch).square().mean() + model.get_submodule("0")(aside).mean()

    model = nn.Sequential(*[part for _ in range(4) for part in (nn.Linear(64, 64), nn.Tanh())])
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    step = torchtrim.TrainStep(model, loss, optimizer, torch.randn(256, 64))
    options = TECHNIQUE.options(step_of(torchtrim.record(step)))
    ranges = [option for option in options if option.where == "Sequential[2:6]"]
    assert [len(option.spans) for option in ranges] == [2]
