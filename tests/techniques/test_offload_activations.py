"""Offload of activations: every bit agrees under every order of streams, predicted peaks are measured."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from bench import offload
from torch import nn
from torch.utils.checkpoint import checkpoint

import draws
import torchtrim
from steps import ConvNet, encoder, flat, squared
from torchtrim.capture.workload import TrainStep
from torchtrim.costs.devices import device_named
from torchtrim.emulator import emulate
from torchtrim.errors import ApplyFailed
from torchtrim.executor.registry import technique
from torchtrim.planner.planner import Planner
from torchtrim.records.budget import Budget
from torchtrim.records.plan import Technique
from torchtrim.records.profile import Profile
from torchtrim.step.edits import PINNED, Edit, host_peak
from torchtrim.step.from_profile import on_device, step_of
from torchtrim.step.simulate import simulate, timeline
from torchtrim.step.step import Step
from torchtrim.techniques.offload_activations.moving import StorageMover
from torchtrim.techniques.offload_activations.places import place_of, placed
from torchtrim.techniques.offload_activations.technique import TECHNIQUE

ORDERS = draws.orders(20)


class Residual(nn.Module):
    """Blocks with a skip, views and in-place writes, as calls of functions."""

    def __init__(self, width: int = 32, layers: int = 4) -> None:
        super().__init__()
        self.inner = nn.ModuleList(nn.Linear(width, 2 * width) for _ in range(layers))
        self.outer = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for inner, outer in zip(self.inner, self.outer, strict=True):
            value, gate = inner(x).chunk(2, -1)
            x = x + outer(torch.tanh(value) * F.relu(gate.contiguous(), inplace=True))
        return x


class Shared(nn.Module):
    """One layer that is called several times."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm = nn.Linear(32, 32), nn.LayerNorm(32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(5):
            x = F.gelu(self.norm(self.layer(x)))
        return x


class Checkpointed(nn.Module):
    """A part of which the script checkpoints itself."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = (_mlp(2) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        x = checkpoint(self.second, x, use_reentrant=False)  # type: ignore[assignment]
        return self.third(x)


class Autocast(nn.Module):
    """Computes in bfloat16."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = _mlp(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cuda", dtype=torch.bfloat16):
            return self.layers(x).float()


class Started(nn.Module):
    """Computes its first part without gradients, as a search for a fixed point."""

    def __init__(self) -> None:
        super().__init__()
        self.search, self.layers = _mlp(2), _mlp(3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            x = self.search(x)
        return self.layers(x)


def _mlp(layers: int, width: int = 32) -> nn.Sequential:
    inner = [part for _ in range(layers) for part in (nn.Linear(width, width), nn.GELU())]
    return nn.Sequential(*inner)


ROWS = (512, 32)
MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "mlp": (lambda: _mlp(5), ROWS),
    "residual": (Residual, ROWS),
    "shared": (Shared, ROWS),
    "checkpointed": (Checkpointed, ROWS),
    "autocast": (Autocast, ROWS),
    "started": (Started, ROWS),
    "dropout": (lambda: nn.Sequential(_mlp(2), nn.Dropout(0.2), _mlp(2)), ROWS),
    "norms": (lambda: nn.Sequential(_mlp(2), nn.LayerNorm(32), _mlp(2), nn.LayerNorm(32)), ROWS),
    "convolutions": (lambda: flat(8, 4), (4, 3, 32, 32)),
    "batch norms": (lambda: ConvNet(8, 3), (4, 3, 32, 32)),
    "encoder": (lambda: encoder(32, 2), (8, 32, 32)),
}


class Ran(NamedTuple):
    """What some steps left, with the profile of the last and the races."""

    left: list[torch.Tensor]
    profile: Profile
    races: list[Any]


def workload(name: str) -> TrainStep:
    """A step of a model, on the emulated device that is on."""
    torch.manual_seed(0)
    make, shape = MODELS[name]
    model = make().cuda()
    optimizer = torch.optim.SGD(model.parameters(), 1e-2)
    return TrainStep(model, squared, optimizer, torch.randn(shape, device="cuda"))


def run(name: str, planned: Technique | None = None, order: str = "") -> Ran:
    """Three steps, planned where a plan is given."""
    with emulate(streams=order) as emulation:
        step = workload(name)
        if planned is not None:
            TECHNIQUE.apply({type(step.model).__name__: step.model}, planned)
        torch.manual_seed(3)
        step.step(0)
        step.step(1)
        profile = torchtrim.record(step)
        left = [*step.model.state_dict().values(), *(p.grad for p in step.model.parameters())]
        left = [one.detach().cpu() for one in left if one is not None]
        races = emulation.orders.races() if emulation.orders is not None else []
        races += [sync for sync in profile.syncs if sync.row.startswith("stream-")]
    return Ran([*left, torch.get_rng_state()], profile, races)


def priced(profile: Profile) -> Step:
    return on_device(step_of(profile), device_named("a100"))


def every(step: Step, *, waits: bool = False) -> tuple[Technique, list[Edit]]:
    """All places that do not exclude each other, as a plan has them, and what they change.

    `waits`: those of each tensor that await its copies, if it has them.
    """
    options = TECHNIQUE.options(step)
    found = offload.every(step, options[::-1] if waits else options)
    planned = Technique(name=TECHNIQUE.name, where=tuple(found))
    return TECHNIQUE.settled(step, planned), list(found.values())


def is_equal(first: Ran, second: Ran) -> bool:
    return all(torch.equal(a, b) for a, b in zip(first.left, second.left, strict=True))


@pytest.mark.parametrize(
    ("name", "waits"),
    [*((name, False) for name in MODELS), *((name, True) for name in ("mlp", "encoder"))],
)
def test_every_bit_agrees_and_the_peak_is_the_planned_one(name: str, waits: bool) -> None:
    original = run(name)
    step = priced(original.profile)
    technique_, edits = every(step, waits=waits)
    found, others = (
        {placed(one)[0] for one in every(step, waits=w)[0].where} for w in (waits, False)
    )
    assert (found == others) != waits
    assert technique_.where
    predicted = simulate(step, edits).peak_bytes
    assert predicted < original.profile.peak_bytes
    for order in ORDERS:
        planned = run(name, technique_, order)
        assert is_equal(original, planned), order
        assert planned.races == []
        assert planned.profile.peak_bytes == pytest.approx(predicted, rel=0.01), order
        pinned = max(timeline(step_of(planned.profile), (), PINNED).before)
        assert pinned == host_peak(edits)


def test_it_is_planned_with_the_others_and_certified() -> None:
    for order in ("", "late"):
        with emulate(streams=order):
            torch.manual_seed(0)
            model = _mlp(5, 64).cuda()
            batch = torch.randn(2048, 64, device="cuda")
            step = TrainStep(model, squared, torch.optim.SGD(model.parameters(), 1e-2), batch)
            with torchtrim.fit(step, "50%", steps=2) as fitted:
                assert "offload_activations" in [one.name for one in fitted.plan.techniques]
                assert fitted.certificate is not None
                assert fitted.certificate.verdict == "BITWISE"
                assert fitted.planned is not None
                predicted = fitted.plan.predicted.peak_bytes
                assert fitted.planned.peak_bytes == pytest.approx(predicted, rel=0.01)


BESIDE = {
    "replay": "Sequential.0:gelu.0",
    "recompute": "Sequential.2",
}


@pytest.mark.parametrize("name", BESIDE)
def test_beside_others(name: str) -> None:
    """Their hooks are within its own: what they do not drop they hand on."""
    original = run("norms")
    planned = every(priced(original.profile))[0]
    with emulate(streams="late") as emulation:
        step = workload("norms")
        roots = {"Sequential": step.model}
        TECHNIQUE.apply(roots, planned)
        technique(name).apply(roots, Technique(name=name, where=(BESIDE[name],)))
        torch.manual_seed(3)
        for number in range(2):
            step.step(number)
        left = [value.detach().cpu() for value in step.model.state_dict().values()]
        assert emulation.orders is not None
        assert emulation.orders.races() == []
        assert torch.cuda.max_memory_allocated() < original.profile.peak_bytes
    assert all(torch.equal(a, b) for a, b in zip(left, original.left, strict=False))


def test_where_nothing_is_to_be_had_it_is_not_planned() -> None:
    """What fits without is left alone, and a CPU has no other memory."""
    with emulate():
        profile = torchtrim.record(workload("mlp"))
    planner = Planner(profile, step_seconds=1.0, fingerprint={})
    assert planner.plan(Budget(profile.peak_bytes)).techniques == ()
    torch.manual_seed(0)
    model = _mlp(5)
    step = TrainStep(model, squared, torch.optim.SGD(model.parameters(), 1e-2), torch.randn(ROWS))
    assert TECHNIQUE.options(step_of(torchtrim.record(step))) == []


def applied(model: nn.Module, batch: torch.Tensor) -> Any:
    """The model with all that can be offloaded."""
    optimizer = torch.optim.SGD(model.parameters(), 1e-2)
    profile = torchtrim.record(TrainStep(model, squared, optimizer, batch))
    return TECHNIQUE.apply({type(model).__name__: model}, every(priced(profile))[0])


@pytest.mark.parametrize("order", ORDERS)
def test_backward_may_ask_twice(order: str) -> None:
    with emulate(streams=order) as emulation:
        torch.manual_seed(0)
        plain, batch = Residual().cuda(), torch.randn(ROWS, device="cuda")
        model = copy.deepcopy(plain)
        applied(model, batch)
        for one in (plain, model):
            one.zero_grad()
            loss = squared(one, batch)
            loss.backward(retain_graph=True)  # type: ignore[no-untyped-call]
            loss.backward()  # type: ignore[no-untyped-call]
        for a, b in zip(plain.parameters(), model.parameters(), strict=True):
            assert a.grad is not None
            assert b.grad is not None
            assert torch.equal(a.grad.cpu(), b.grad.cpu())
        assert emulation.orders is None or emulation.orders.races() == []


@pytest.mark.parametrize("order", ["", "late", "random:5"])
def test_what_fails_in_the_middle_leaves_nothing(order: str) -> None:
    with emulate(streams=order) as emulation:
        torch.manual_seed(0)
        plain, batch = _mlp(5).cuda(), torch.randn(ROWS, device="cuda")
        model = copy.deepcopy(plain)
        handle = applied(model, batch)
        fails = model[6].register_forward_pre_hook(lambda *_: 1 / 0)
        gc.collect()
        before = torch.cuda.memory_allocated()
        for _ in range(3):
            with pytest.raises(ZeroDivisionError):
                model(batch)
        fails.remove()
        model(batch).sum()
        gc.collect()
        assert torch.cuda.memory_allocated() == before
        model.zero_grad()
        squared(model, batch).backward()  # type: ignore[no-untyped-call]
        squared(plain, batch).backward()  # type: ignore[no-untyped-call]
        for a, b in zip(plain.parameters(), model.parameters(), strict=True):
            assert a.grad is not None
            assert b.grad is not None
            assert torch.equal(a.grad.cpu(), b.grad.cpu())
        handle.revert()
        assert type(model) is nn.Sequential
        assert emulation.orders is None or emulation.orders.races() == []


def test_pinned_memory_does_not_grow(monkeypatch: pytest.MonkeyPatch) -> None:
    movers: list[StorageMover] = []
    own = StorageMover.__init__

    def init(self: StorageMover, *sizes: int) -> None:
        own(self, *sizes)
        movers.append(self)

    monkeypatch.setattr(StorageMover, "__init__", init)
    with emulate(streams="late"):
        torch.manual_seed(0)
        model, batch = _mlp(4).cuda(), torch.randn(ROWS, device="cuda")
        applied(model, batch)
        (mover,) = movers
        seen = []
        for _ in range(draws.count(200)):
            squared(model, batch).backward()  # type: ignore[no-untyped-call]
            seen.append((mover.stores[False].bytes, len(gc.get_referrers(mover))))
        streams = mover.streams
        assert streams is mover.streams
    assert len(set(seen[1:])) == 1
    assert mover.stores[False].bytes == mover.stores[False]._slab_bytes


def test_places_read_as_they_are_written() -> None:
    for text in (
        "Net:gelu.3 until addmm.9 from addmm.12",
        "Net:dropout.0/1 until end from rms_norm-mul.0",
    ):
        assert str(place_of(text)) == text
    for text in ("Net", "Net:gelu.3", "Net:gelu.3 until from addmm.1", "Net:gelu.3 until a.1 from"):
        with pytest.raises(ApplyFailed, match="cannot read"):
            place_of(text)


def test_a_fetch_that_forgets_to_wait_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same, with the mistake of NVIDIA/Megatron-LM#7398 and of a compute stream that does not wait."""
    from torchtrim.techniques.offload_activations.moving import MovedStorage

    original = run("mlp")
    planned = every(priced(original.profile))[0]
    monkeypatch.setattr(MovedStorage, "_land", lambda self: setattr(self, "_arrived", None))
    assert is_equal(original, run("mlp", planned))
    broken = run("mlp", planned, "late")
    assert not is_equal(original, broken)
    assert broken.races


def test_a_source_that_is_let_go_too_early_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    from torchtrim.techniques.offload_activations.moving import MovedStorage

    def release(self: MovedStorage) -> None:
        self._here, self._is_original = None, False

    original = run("mlp")
    planned = every(priced(original.profile))[0]
    monkeypatch.setattr(MovedStorage, "release", release)
    assert is_equal(original, run("mlp", planned))
    assert not is_equal(original, run("mlp", planned, "late"))


def test_on_a_cpu_everything_stays() -> None:
    """A plan for a device may be run where there is none."""
    torch.manual_seed(0)
    plain, batch = _mlp(3), torch.randn(ROWS)
    model = copy.deepcopy(plain)
    where = ("Sequential:gelu.0 until end from gelu.1", "Sequential:addmm.1 until gelu.2 from t.2")
    TECHNIQUE.apply({"Sequential": model}, Technique(name=TECHNIQUE.name, where=where))
    for one in (plain, model):
        squared(one, batch).backward()  # type: ignore[no-untyped-call]
    for a, b in zip(plain.parameters(), model.parameters(), strict=True):
        assert a.grad is not None
        assert b.grad is not None
        assert torch.equal(a.grad, b.grad)


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_a_joint_plan_is_never_slower_than_one_of_a_kind(name: str) -> None:
    profile = run(name).profile

    def planner(*exclude: str) -> Planner:
        return Planner(profile, step_seconds=1.0, fingerprint={}, exclude=exclude)

    joint = planner()
    for one in (planner("recompute", "replay"), planner(TECHNIQUE.name)):
        low, high = one.floor.outcome.peak_bytes, one.simulated_original
        for part in range(5):
            budget = low + (high - low) * part // 5
            found = joint._within(budget)
            alone = one._within(budget)
            assert found is not None
            assert alone is not None
            assert found.outcome.added_seconds <= alone.outcome.added_seconds + 1e-12
