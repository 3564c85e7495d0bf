"""Overwrite: equal results, exact undo, less memory, and where it must not be."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn

import torchtrim
from torchtrim.capture.workload import TrainStep
from torchtrim.errors import ApplyFailed, InfeasibleBudget
from torchtrim.planner.planner import Planner
from torchtrim.records.budget import memory_limit
from torchtrim.records.plan import Technique
from torchtrim.records.profile import Profile
from torchtrim.records.terms import Terms
from torchtrim.records.trial import Request
from torchtrim.step.edits import overwritten
from torchtrim.step.from_profile import step_of as read_step
from torchtrim.step.simulate import simulate
from torchtrim.techniques.overwrite.technique import TECHNIQUE, TYPES
from torchtrim.workflows.optimize.fitting import Fitting

MAKE: dict[str, Callable[[], nn.Module]] = {
    "ReLU": nn.ReLU,
    "LeakyReLU": lambda: nn.LeakyReLU(0.1),
    "ReLU6": nn.ReLU6,
    "Hardtanh": lambda: nn.Hardtanh(-0.2, 0.1),
}


class Block(nn.Module):
    """Two convolutions with a shortcut; the activation after the sum overwrites nothing of the shortcut."""

    def __init__(self, activation: nn.Module) -> None:
        super().__init__()
        self.one, self.two = nn.Conv2d(8, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1)
        self.norm, self.act = nn.BatchNorm2d(8), activation

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.act(self.norm(self.two(self.act(self.one(x)))) + x)


def net(name: str) -> nn.Module:
    torch.manual_seed(0)
    make = MAKE[name]
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), make(), Block(make()), Block(make())
    )


def squares(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return model(batch).square().mean()


def step_of(model: nn.Module) -> TrainStep:
    batch = torch.randn(4, 3, 24, 24)
    return TrainStep(model, squares, torch.optim.SGD(model.parameters(), 0.1), batch)


def profile_of(model: nn.Module) -> Profile:
    return torchtrim.record(step_of(model))


def technique(*where: str) -> Technique:
    return Technique(name="overwrite", where=where)


def assert_equal_gradients(model: nn.Module, twin: nn.Module) -> None:
    """Of two backward passes, bit for bit."""
    for _ in range(2):
        x = torch.randn(4, 3, 24, 24)
        for one in (model, twin):
            one.zero_grad()
            squares(one, x).backward()
        for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
            assert torch.equal(ours.grad, theirs.grad)


def test_every_type_has_its_case() -> None:
    assert set(MAKE) == TYPES


@pytest.mark.parametrize("name", sorted(TYPES))
def test_every_bit_agrees_and_what_was_predicted_is_measured(name: str) -> None:
    model = net(name)
    twin = copy.deepcopy(model)
    profile = profile_of(model)
    options = TECHNIQUE.options(read_step(profile))
    places = [option.where for option in options]
    assert places == ["Sequential.2", "Sequential.3.act", "Sequential.4.act"]
    tasks = [span.first for option in options for span in option.spans]
    predicted = simulate(overwritten(read_step(profile), tasks)).peak_bytes
    handle = TECHNIQUE.apply({"Sequential": model}, technique(*places))
    assert predicted == simulate(read_step(profile_of(model))).peak_bytes
    assert_equal_gradients(model, twin)
    assert all(torch.equal(v, twin.state_dict()[k]) for k, v in model.state_dict().items())
    handle.revert()
    assert not any(getattr(module, "inplace", False) for module in model.modules())


@pytest.mark.usefixtures("without_replay")
def test_it_lowers_the_floor_and_the_proof_holds() -> None:
    step = step_of(net("ReLU"))
    profile = torchtrim.record(step)
    floors = [
        Planner(profile, step_seconds=1.0, fingerprint={}, exclude=left).floor.outcome.peak_bytes
        for left in ((), ("overwrite",))
    ]
    assert floors[0] <= floors[1]
    with torchtrim.fit(step, "85%", steps=2) as fitted:
        assert fitted.certificate is not None
        assert fitted.certificate.verdict == "BITWISE"
        assert {one.name for one in fitted.plan.techniques} == {"overwrite", "recompute"}


WAYS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "view": lambda x: x.view(2, 3, 8),
    "turned": lambda x: x.view(2, 3, 8).transpose(0, 1),
    "flat": lambda x: x.view(-1),
    "expanded by one": lambda x: x[None],
    "chunk": lambda x: x.chunk(1)[0],
    "no view": lambda x: x * 1,
}


class OnView(nn.Module):
    """An activation of what a linear layer gives, seen in another shape."""

    def __init__(self, name: str, way: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.act, self.way = nn.Linear(8, 8), MAKE[name](), WAYS[way]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.act(self.way(self.layer(x)))


def twice(model: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    """The result, its gradients, and the gradients of those."""
    made = model(x)
    first = torch.autograd.grad(made.square().sum(), [x, *model.parameters()], create_graph=True)
    second = torch.autograd.grad(sum(one.square().sum() for one in first), [x])
    return [made, *first, *second]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", sorted(TYPES))
def test_a_view_is_overwritten_and_differentiated_twice_bit_for_bit(name: str, way: str) -> None:
    model = OnView(name, way)
    x = torch.randn(6, 8, requires_grad=True)
    plain = twice(model, x)
    handle = TECHNIQUE.apply({"OnView": model}, technique("OnView.act"))
    overwritten = twice(model, x)
    assert all(torch.equal(a, b) for a, b in zip(plain, overwritten, strict=True))
    handle.revert()
    assert model(x).grad_fn.name() == plain[0].grad_fn.name()


@pytest.mark.parametrize("name", sorted(TYPES))
def test_a_views_history_is_not_put_together_anew(name: str) -> None:
    model = OnView(name, "view")
    TECHNIQUE.apply({"OnView": model}, technique("OnView.act"))
    nodes, waiting = set(), [model(torch.randn(6, 8)).grad_fn]
    while waiting:
        node = waiting.pop()
        nodes.add(node.name())
        waiting += [one for one, _ in node.next_functions if one is not None]
    assert not nodes & {"CopySlices", "AsStridedBackward0"}
    assert "AddmmBackward0" in nodes


@pytest.mark.parametrize("name", sorted(TYPES))
def test_who_saved_the_view_or_its_base_is_told_that_it_was_overwritten(name: str) -> None:
    act = MAKE[name]()
    TECHNIQUE.apply({"Net": act}, technique("Net"))
    for saves_base in (False, True):
        base = torch.randn(6, 8, requires_grad=True) * 1.0
        view = base.view(48)
        saved = (base if saves_base else view).square()
        act(view)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            saved.sum().backward()


@pytest.mark.parametrize("name", sorted(TYPES))
def test_a_view_under_autocast_without_gradients_and_by_functional_call(name: str) -> None:
    model, x = OnView(name, "view"), torch.randn(6, 8)
    values = {key: value.detach() * 2 for key, value in model.named_parameters()}

    def found() -> list[torch.Tensor]:
        with torch.no_grad():
            results = [model(x)]
        with torch.inference_mode():
            results.append(model(x).clone())
        with torch.autocast("cpu", torch.bfloat16):
            results.append(model(x))
        results[-1].sum().backward()
        results += [parameter.grad for parameter in model.parameters()]
        model.zero_grad()
        return [*results, torch.func.functional_call(model, values, (x,))]

    plain = found()
    TECHNIQUE.apply({"OnView": model}, technique("OnView.act"))
    assert all(torch.equal(a, b) for a, b in zip(plain, found(), strict=True))


@pytest.mark.parametrize("name", sorted(TYPES))
def test_compilers_and_transforms_see_the_modules_own_forward(name: str) -> None:
    model, x = OnView(name, "view"), torch.randn(6, 8)
    model.requires_grad_(False)
    TECHNIQUE.apply({"OnView": model}, technique("OnView.act"))
    given = x.clone().requires_grad_()
    (expected,) = torch.autograd.grad(model(given).square().sum(), given)
    assert torch.equal(torch.func.grad(lambda x: model(x).square().sum())(x), expected)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    (found,) = torch.autograd.grad(compiled(given).square().sum(), given)
    assert torch.equal(found, expected)


class Mlp(nn.Module):
    """Tokens in three dimensions, as in most transformers."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.one, self.act, self.two = nn.Linear(16, 64), MAKE[name](), nn.Linear(64, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.two(self.act(self.one(x)))


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(TYPES))
def test_what_is_predicted_of_tokens_is_measured(name: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(Mlp(name) for _ in range(4)))
    step = TrainStep(
        model, squares, torch.optim.SGD(model.parameters(), 0.1), torch.randn(8, 16, 16)
    )
    for excluded in (("replay",), ("replay", "recompute")):
        fitting = Fitting(step, Request(steps=2), lambda _: None, Terms(exclude=excluded))
        found = fitting.nearest(memory_limit("1%"))
        assert "overwrite" in {one.name for one in found.plan.techniques}
        assert found.planned is not None
        assert found.certificate is not None
        assert found.certificate.verdict == "BITWISE"
        assert found.planned.peak_bytes == found.plan.predicted.peak_bytes


class Names(nn.Module):
    """The input of its activation is looked at again: by a name, by an operator or by backward."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.layer, self.act, self.kind = nn.Linear(8, 8), nn.ReLU(), kind

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made = torch.tanh(self.layer(x)) if self.kind == "saved" else self.layer(x)
        if self.kind == "part":
            return self.act(made[:, :4])
        out = self.act(made)
        if self.kind == "named":
            return out.square()
        return out + made if self.kind == "read" else out


@pytest.mark.parametrize("kind", ["saved", "read", "named", "part", "input", "hooked"])
def test_what_is_needed_again_is_not_overwritten(kind: str) -> None:
    model: nn.Module = Names(kind)
    if kind == "input":
        model = nn.Sequential(nn.ReLU(), nn.Linear(8, 8))
    if kind == "hooked":
        model = nn.Sequential(nn.Linear(8, 8), nn.ReLU())
        model[0].register_forward_hook(lambda module, given, made: None)
    step = TrainStep(model, squares, torch.optim.SGD(model.parameters(), 0.1), torch.randn(4, 8))
    assert TECHNIQUE.options(read_step(torchtrim.record(step))) == []


@pytest.mark.parametrize("where", ["Sequential.0", "Sequential.9", "Other.2"])
def test_a_place_that_is_none_is_refused_and_nothing_is_changed(where: str) -> None:
    model = net("ReLU")
    with pytest.raises(ApplyFailed, match=where):
        TECHNIQUE.apply({"Sequential": model}, technique("Sequential.2", where))
    assert not model[2].inplace


CLAMPS: dict[str, Callable[[], nn.Module]] = {
    "ReLU6": lambda: nn.ReLU6(inplace=True),
    "Hardtanh": lambda: nn.Hardtanh(-0.2, 0.1, inplace=True),
}


def copying(name: str) -> nn.Module:
    """A network whose clamps write over their input, and keep a copy of it."""
    torch.manual_seed(0)
    make = CLAMPS[name]
    return nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), make(), Block(make()))


@pytest.mark.parametrize("name", sorted(CLAMPS))
def test_a_clamp_in_place_keeps_no_copy(name: str) -> None:
    model = copying(name)
    twin, step = copy.deepcopy(model), read_step(profile_of(model))
    options = TECHNIQUE.options(step)
    assert [one.where for one in options] == ["Sequential.2", "Sequential.3.act"]
    tasks = [span.first for one in options for span in one.spans]
    predicted = simulate(overwritten(step, tasks)).peak_bytes
    assert predicted < 0.85 * simulate(step).peak_bytes
    handle = TECHNIQUE.apply({"Sequential": model}, technique(*(one.where for one in options)))
    assert predicted == pytest.approx(simulate(read_step(profile_of(model))).peak_bytes, rel=1e-3)
    assert_equal_gradients(model, twin)
    handle.revert()
    assert type(model[2]) is type(twin[2])


@pytest.mark.parametrize("value", [-0.2, 0.1, -0.0, 0.0, float("nan"), float("inf"), -1e-45])
def test_a_clamp_at_its_bounds_has_the_gradient_of_torch(value: float) -> None:
    module = nn.Hardtanh(-0.2, 0.1)
    found = []
    for ours in (False, True):
        handle = TECHNIQUE.apply({"Net": module}, technique("Net")) if ours else None
        x = torch.full((3,), value, dtype=torch.float64, requires_grad=True)
        y = module(x * 1.0)
        (grad,) = torch.autograd.grad(y.sum() * 2, x, create_graph=True)
        found.append((y.detach(), grad.detach()))
        if handle is not None:
            handle.revert()
    assert all(
        torch.equal(a, b) or (a.isnan() & b.isnan()).all() for a, b in zip(*found, strict=True)
    )


class Later(nn.Module):
    """Something writes over the result of a clamp before backward."""

    def __init__(self, *, inplace: bool) -> None:
        super().__init__()
        self.layer, self.act = nn.Conv2d(3, 8, 3), nn.ReLU6(inplace)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.act(self.layer(x)).add_(1.0)


@pytest.mark.parametrize("inplace", [False, True])
def test_a_clamp_whose_result_is_written_over_stays(inplace: bool) -> None:
    assert not TECHNIQUE.options(read_step(profile_of(Later(inplace=inplace))))


@pytest.mark.slow
@pytest.mark.parametrize("inplace", [False, True])
def test_clamps_go_with_what_else_is_planned(inplace: bool) -> None:
    """Recomputed blocks and replayed norms hold clamps that keep no copy, bit for bit."""
    torch.manual_seed(0)
    blocks = (Block(nn.ReLU6(inplace)) for _ in range(6))
    step = step_of(nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), *blocks))
    with pytest.raises(InfeasibleBudget) as lowest:
        torchtrim.fit(step, "1%", steps=2)
    with torchtrim.fit(step, int(1.03 * lowest.value.smallest_bytes), steps=2) as fitted:
        assert fitted.certificate is not None
        assert fitted.certificate.verdict == "BITWISE"
        names = {one.name for one in fitted.plan.techniques}
        assert "overwrite" in names
        assert len(names) > 1
        assert fitted.planned is not None
        assert fitted.planned.peak_bytes == pytest.approx(
            fitted.plan.predicted.peak_bytes, rel=0.01
        )


def test_calls_without_gradients_are_as_they_were() -> None:
    module = nn.ReLU6()
    handle = TECHNIQUE.apply({"Net": module}, technique("Net"))
    x = torch.randn(8)
    with torch.no_grad():
        y = module(x)
    assert y is not x
    assert torch.equal(module(input=x), x.clamp(0, 6))
    handle.revert()
