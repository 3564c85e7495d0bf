"""Every two techniques that do not exclude each other: in both orders, taken back in either order.

The step is recorded on an emulated device, where all techniques have something to offer. What a technique
that makes another function offers beside is read off a step that was recorded with it.
"""

from __future__ import annotations

import functools
import importlib.util
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import draws
import torchtrim
from torchtrim import TrainStep
from torchtrim.costs.devices import device_named
from torchtrim.emulator import emulate
from torchtrim.executor.apply import named_roots
from torchtrim.executor.registry import Replaces, names, technique
from torchtrim.planner.pins import overlap
from torchtrim.records.plan import Technique
from torchtrim.step.edits import Edit
from torchtrim.step.from_profile import on_device, step_of
from torchtrim.step.step import Step

CLASSES, WIDTH, LENGTH, STEPS, OPTIONS = 2000, 32, 64, 2, 12
ELSEWHERE = {
    "arena",
    "bounded_state",
    "compress_gradients",
    "data_parallel",
    "in_place",
    "recompute_function",
    "relative_attention",
    "release",
    "shard",
    "split_batch",
    "split_time",
}
"""Those for inference, streams, several processes, scripts or a kind of model of their own."""
if importlib.util.find_spec("torchao") is None:
    ELSEWHERE.add("low_bit_states")
SCALED = {"from_batch": 8, "to_batch": 16, "rule": "sqrt", "warmup": 0}


class Net(nn.Module):
    """Tokens through an embedding, a convolution with BatchNorm, blocks with dropout, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(CLASSES, WIDTH)
        self.stem = nn.Sequential(
            nn.Conv1d(WIDTH, WIDTH, 3, padding=1, bias=False),
            nn.BatchNorm1d(WIDTH),
            nn.ReLU(),
        )
        self.blocks = nn.ModuleList(
            nn.Sequential(
                nn.LayerNorm(WIDTH),
                nn.Sequential(nn.Linear(WIDTH, 8 * WIDTH), nn.GELU(), nn.Linear(8 * WIDTH, WIDTH)),
                nn.Dropout(0.1),
            )
            for _ in range(2)
        )
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.stem(self.tokens(x).transpose(1, 2)).transpose(1, 2).contiguous()
        for block in self.blocks:
            hidden = hidden + block(hidden)
        made: Tensor = self.head(hidden)
        return made


def loss_of(model: nn.Module, batch: Tensor) -> Tensor:
    return F.cross_entropy(model(batch).view(-1, CLASSES), batch.view(-1))


def workload() -> TrainStep:
    torch.manual_seed(0)
    model = Net().cuda()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3, eps=1e-2, foreach=True)
    return TrainStep(
        model, loss_of, optimizer, torch.randint(0, CLASSES, (10, LENGTH), device="cuda")
    )


def roots_of(step: TrainStep) -> Mapping[str, Any]:
    return named_roots((step.model, *step.optimizers))


class Offer(NamedTuple):
    """A place of a technique as a plan names it, with what it claims; none is known of what replaces."""

    plan: Technique
    edit: Edit | None


@functools.cache
def recorded(*first: str) -> Step:
    """The step, with the first offer of a technique applied."""
    with emulate():
        step = workload()
        step.step(0)
        for name in first:
            technique(name).apply(roots_of(step), offers(name)[0].plan)
        return on_device(step_of(torchtrim.record(step)), device_named("a100"))


@functools.cache
def offers(name: str, *beside: str) -> Sequence[Offer]:
    """What it offers, with another applied."""
    if name == "scale_lr":
        plan = Technique(name=name, where=("AdamW",), options=SCALED, equivalence="SEMANTIC")
        return (Offer(plan, None),)
    unit, step, found = technique(name), recorded(*beside), []
    for option in itertools.islice(unit.options(step), OPTIONS):
        edit = None if isinstance(unit, Replaces) else unit.edits(step, option)
        plan = Technique(
            name=name,
            where=(option.where,),
            options=dict(option.settings),
            equivalence=option.equivalence or unit.equivalence,
        )
        if edit is not None or isinstance(unit, Replaces):
            found.append(Offer(plan, edit))
    return tuple(found)


def pair_of(one: str, other: str) -> tuple[Technique, Technique] | None:
    """The first places of both that go together; None where none do."""
    semantic = [name for name in (one, other) if isinstance(technique(name), Replaces)]
    if len(semantic) == 1:
        (first,) = semantic
        second = other if first == one else one
        plan = offers(first)[0].plan
        unit = technique(first)
        assert isinstance(unit, Replaces)
        beside = [] if second in unit.bars(plan) else offers(second, *_recorded_with(first))
        return (plan, beside[0].plan) if beside else None
    for a, b in itertools.product(offers(one), offers(other)):
        barred = any(_bars(x, y) for x, y in ((a, b), (b, a)))
        claims = (a.edit.claims if a.edit else ()), (b.edit.claims if b.edit else ())
        if not barred and not overlap(*claims):
            return a.plan, b.plan
    return None


def _recorded_with(name: str) -> tuple[str, ...]:
    return () if name == "scale_lr" else (name,)


def _bars(offer: Offer, other: Offer) -> bool:
    unit = technique(offer.plan.name)
    return isinstance(unit, Replaces) and other.plan.name in unit.bars(offer.plan)


def trained(step: TrainStep, first: int = 0) -> list[Tensor]:
    """What some steps leave: parameters, buffers, the optimizer's state, the generator."""
    torch.manual_seed(first)
    for number in range(first, first + STEPS):
        step.step(number)
    (optimizer,) = step.optimizers
    state = optimizer.state_dict()["state"]
    states = [value for number in sorted(state) for value in state[number].values()]
    left = [*step.model.state_dict().values(), *states]
    return [one.detach().cpu().clone() for one in left] + [torch.get_rng_state()]


def applied(step: TrainStep, plans: Sequence[Technique]) -> list[Any]:
    return [technique(plan.name).apply(roots_of(step), plan) for plan in plans]


@functools.cache
def alone(name: str = "") -> tuple[list[Tensor], list[Tensor]]:
    """What a step leaves with one technique or none, and steps that follow without."""
    with emulate():
        step = workload()
        handles = applied(step, [offers(name)[0].plan] if name else [])
        before = trained(step)
        for handle in handles:
            handle.revert()
        return before, trained(step, STEPS)


def shape_of(step: TrainStep) -> list[Any]:
    """What reverting has to bring back: classes, attributes and hooks of modules and optimizer."""
    found: list[Any] = []
    for module in step.model.modules():
        hooks = sum(len(v) for k, v in module.__dict__.items() if k.endswith("hooks"))
        found.append((type(module), sorted(module.__dict__), hooks))
    (optimizer,) = step.optimizers
    found.append((type(optimizer), sorted(optimizer.__dict__), len(optimizer.param_groups)))
    found.extend(len(p._post_accumulate_grad_hooks or ()) for p in step.model.parameters())
    return found


def every_pair() -> Iterator[tuple[str, str]]:
    yield from itertools.combinations([name for name in names() if name not in ELSEWHERE], 2)


def test_each_technique_has_something_to_offer_here() -> None:
    for name in names():
        if name not in ELSEWHERE:
            assert offers(name), name


def tolerance_of(plans: Sequence[Technique]) -> float:
    """How far a result may be off, as a share of its norm; half precision and 8 bits round more.

    The optimizer divides by no small numbers, so that it does not enlarge what gradients differ by.
    """
    if all(plan.equivalence != "ROUNDING" for plan in plans):
        return 0.0
    coarse = {"precision", "low_bit_states"}
    return 2e-2 if any(plan.name in coarse for plan in plans) else 1e-5


def assert_alike(found: list[Tensor], right: list[Tensor], tolerance: float) -> None:
    for one, other in zip(found, right, strict=True):
        if tolerance and one.is_floating_point():
            assert (one - other).norm() <= tolerance * other.norm()
        else:
            assert torch.equal(one, other)


@pytest.mark.parametrize("pair", draws.some(list(every_pair())), ids="+".join)
def test_both_orders_are_equal_and_reverting_in_either_restores(pair: tuple[str, str]) -> None:
    plans = pair_of(*pair)
    if plans is None:
        pytest.skip("they exclude each other")
    results, after = [], []
    backwards = (False, True) if draws.is_full() else (False,)
    for order, turned in itertools.product((plans, plans[::-1]), backwards):
        with emulate():
            step = workload()
            before = shape_of(step)
            handles = applied(step, order)
            results.append(trained(step))
            for handle in handles[::-1] if turned else handles:
                handle.revert()
            assert shape_of(step) == before
            after.append(trained(step, STEPS))
    for one, other in itertools.product(results[1:], after[1:]):
        assert_alike(one, results[0], 0.0)
        assert_alike(other, after[0], 0.0)
    semantic = [plan.name for plan in plans if plan.equivalence == "SEMANTIC"]
    if len(semantic) < len(plans):
        tolerance = tolerance_of(plans)
        assert_alike(results[0], alone(*semantic)[0], tolerance)
        assert_alike(after[0], alone(*semantic)[1], tolerance)
