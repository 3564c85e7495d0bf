"""Functions of a script that rerun in backward: a renderer, and an embedding with the network behind it."""

from __future__ import annotations

import inspect
import sys
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from steps import fitting
from torchtrim import TrainStep
from torchtrim.capture.functions import FunctionCalls, function_at
from torchtrim.dispatch.places import Places
from torchtrim.errors import ApplyFailed
from torchtrim.planner.planner import Planner
from torchtrim.records.budget import Budget
from torchtrim.records.profile import Profile
from torchtrim.techniques.recompute_function.running import rerun_functions

HERE = __name__
seen: list[int] = []


class Field(nn.Module):
    """A small network over an embedding."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(39, width), nn.Linear(width, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(F.relu(self.first(x)))


def embedded(x: Tensor, bands: int = 6) -> Tensor:
    waves = [f(x * 2.0**band) for band in range(bands) for f in (torch.sin, torch.cos)]
    return torch.cat([x, *waves], -1)


def query(points: Tensor, *, field: nn.Module) -> Tensor:
    return field(embedded(points))


def composite(raw: Tensor, noise: float = 0.1) -> Tensor:
    alpha = 1 - torch.exp(-F.relu(raw[..., 3] + noise * torch.randn_like(raw[..., 3])))
    return (torch.cumprod(1 - alpha + 1e-10, -1)[..., None] * torch.sigmoid(raw[..., :3])).sum(-2)


def counted(raw: Tensor) -> Tensor:
    seen.extend([1])
    return raw.sigmoid().exp().sin()


def marked(raw: Tensor) -> Tensor:
    seen.append(raw)
    return raw.sigmoid().exp().sin()


def rendered(model: nn.Module, batch: Tensor) -> Tensor:
    raw = query(batch, field=model)
    again = query(batch + 1, field=model)
    return composite(raw).square().mean() + composite(again).mean() + counted(raw).mean()


def remembered(field: nn.Module, x: Tensor, store: Any = None) -> Tensor:
    made = field(embedded(x))
    if store is not None:
        store["last"] = made.detach()
    return made * (1 + 0.1 * getattr(field, "factor", 0))


def noted(field: Any, x: Tensor) -> Tensor:
    field.calls.append(1)
    return field(embedded(x)) * len(field.calls)


traced = pytest.mark.skipif(sys.gettrace() is not None, reason="frames are not marked")


@pytest.fixture(scope="module")
def recorded() -> tuple[Any, Profile]:
    torch.manual_seed(0)
    field = Field()
    optimizer = torch.optim.Adam(field.parameters())
    tried = fitting(TrainStep(field, rendered, optimizer, torch.randn(256, 32, 3)))
    profile = tried.observe().profile
    assert profile is not None
    return tried, profile


@traced
def test_a_function_that_may_run_twice_is_planned_as_predicted(
    recorded: tuple[Any, Profile],
) -> None:
    tried, profile = recorded
    calls = {one.name.rpartition(".")[2]: len(one.calls) for one in profile.functions}
    # A step begins where its first root does: of its first query, the embedding is at the end.
    assert {"query": 3, "embedded": 2, "composite": 2, "counted": 1}.items() <= calls.items()
    pins = {"recompute_function": [f"*{HERE}.composite", f"*{HERE}.query"]}
    planner = Planner(profile, step_seconds=0.0, fingerprint={}, pins=pins)
    places = [f"Field:{HERE}.composite", f"Field:{HERE}.query"]
    assert [where for _, where in planner.pinned.forced] == places
    bias = profile.peak_bytes - planner.simulated_original
    plan = planner.floor_plan(Budget(0, bias=bias))
    trial = tried.run_planned(plan)
    assert trial.peak_bytes == pytest.approx(plan.predicted.peak_bytes, rel=0.005)
    assert tried.verify(tried.observe(), plan, trial).verdict == "BITWISE"


@traced
def test_what_writes_is_not_offered(recorded: tuple[Any, Profile]) -> None:
    _, profile = recorded
    offered = {
        option.where
        for option, _ in Planner(profile, step_seconds=0.0, fingerprint={})._offered()
        if option.technique == "recompute_function"
    }
    assert f"Field:{HERE}.query" in offered
    assert f"Field:{HERE}.counted" not in offered


@pytest.fixture
def planned() -> Iterator[Callable[[str], Any]]:
    handles = []

    def plan(name: str) -> Any:
        handles.append(rerun_functions([f"Field:{HERE}.{name}"], lambda *_: None))
        return handles[-1]

    yield plan
    for handle in handles:
        handle.revert()


def test_a_planned_function_is_the_same_function_with_another_code(
    planned: Callable[[str], Any],
) -> None:
    code, signature, field = query.__code__, inspect.signature(query), Field()
    points = torch.randn(64, 3)
    before = query(points, field=field)
    handle = planned("query")
    after = query(points, field=field)
    assert torch.equal(before, after)
    assert inspect.signature(query) == signature
    after.sum().backward()
    first = [one.grad.clone() for one in field.parameters()]
    field.zero_grad()
    handle.revert()
    assert (query.__code__, query.__kwdefaults__) == (code, None)
    query(points, field=field).sum().backward()
    assert all(map(torch.equal, first, (one.grad for one in field.parameters())))


def test_a_default_argument_and_random_numbers_are_as_they_were(
    planned: Callable[[str], Any],
) -> None:
    raw = torch.randn(8, 16, 4, requires_grad=True)
    grads = []
    for plans in (False, True):
        if plans:
            planned("composite")
        torch.manual_seed(1)
        grads.append(torch.autograd.grad(composite(raw).sum(), raw)[0])
        grads.append(torch.rand(1))
    assert all(map(torch.equal, grads[:2], grads[2:]))


def test_it_runs_as_it_is_under_a_transform_of_torch_func(planned: Callable[[str], Any]) -> None:
    planned("embedded")
    x = torch.randn(4, 3)
    made = torch.func.vmap(torch.func.jacrev(embedded))(x)
    assert made.shape == (4, 39, 3)


def test_what_a_function_writes_through_its_arguments_is_not_written_twice(
    planned: Callable[[str], Any],
) -> None:
    field, x = Field(), torch.randn(4, 3)
    planned("remembered")
    remembered(field, x, None).sum().backward()
    seen: dict[str, Tensor] = {}
    remembered(field, x, seen).sum().backward()
    assert seen["last"].shape == (4, 4)
    planned("noted")
    vars(field)["calls"] = []
    with pytest.raises(ApplyFailed, match=r"calls `field.calls.append`"):
        noted(field, x)


def test_a_list_that_a_function_appends_to_grows_once(planned: Callable[[str], Any]) -> None:
    planned("marked")
    raw, before = torch.randn(4, 3, requires_grad=True), len(seen)
    out = marked(raw)
    out.sum().backward()
    assert len(seen) == before + 1
    del seen[before:]


def test_what_cannot_be_planned_is_refused_by_name(planned: Callable[[str], Any]) -> None:
    with pytest.raises(ApplyFailed, match=r"has a function .*\.missing. Plan again"):
        planned("missing")
    with pytest.raises(ApplyFailed, match="cannot run a second time"):
        planned("counted")
    planned("embedded")
    with pytest.raises(ApplyFailed, match="planned already"):
        planned("embedded")


@traced
def test_calls_of_a_function_are_told_apart_and_frames_are_not_kept() -> None:
    calls, kept = FunctionCalls(Places(__file__.rpartition("/")[0])), []

    def inner(number: int) -> None:
        held = torch.zeros(1)
        kept.append(weakref.ref(held))
        calls.ran(sys._getframe(), number)
        calls.ran(sys._getframe(), number + 1)

    for number in (0, 2, 4):
        inner(number)
    assert [one() for one in kept] == [None] * 3
    found = [(one.first, one.last) for one in calls._calls if one.code is inner.__code__]
    assert found == [(0, 2), (2, 4), (4, 6)]


def test_a_function_is_found_by_its_name() -> None:
    assert function_at(f"{HERE}.composite") is composite
    assert function_at(f"{HERE}.seen") is None
    assert function_at("no.such.module") is None
