"""The simulated peak against the measured one."""

from __future__ import annotations

import itertools
import random

import pytest
import torch

from steps import STEPS, trial
from torchtrim.certify.fit import Fitting
from torchtrim.certify.trial import Request
from torchtrim.planner.search import Search
from torchtrim.planner.simulate import Simulator
from torchtrim.records.plan import Plan, Prediction, Technique
from torchtrim.techniques.base import Option, Span
from torchtrim.techniques.recompute import TECHNIQUE


def plan_of(options: list[Option]) -> Plan:
    where = tuple(option.where for option in options)
    return Plan(
        torchtrim="0",
        script="",
        fingerprint={},
        budget_bytes=1,
        techniques=(Technique(name="recompute", where=where),),
        predicted=Prediction(peak_bytes=0, step_seconds=0.0),
    )


def apart(options: list[Option], count: int, seed: int) -> list[Option]:
    """Some options whose spans do not overlap."""
    chosen: list[Option] = []
    for option in random.Random(seed).sample(options, len(options)):
        spans = [s for o in chosen for s in o.spans]
        clash = any(a.first < b.last and b.first < a.last for a in option.spans for b in spans)
        if not clash and len(chosen) < count:
            chosen.append(option)
    return chosen


@pytest.mark.parametrize("name", STEPS)
def test_nothing_chosen_is_the_original(name: str) -> None:
    torch.manual_seed(0)
    found, profile = trial(STEPS[name]())
    simulated = Simulator(profile).run(()).peak_bytes
    assert simulated == pytest.approx(found.peak_bytes, rel=0.01)


@pytest.mark.parametrize("name", STEPS)
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_predicted_is_measured(name: str, seed: int) -> None:
    torch.manual_seed(0)
    step = STEPS[name]()
    found, profile = trial(step)
    options = apart(list(TECHNIQUE.options(profile)), seed + 1, seed)
    simulator = Simulator(profile)
    predicted = simulator.run(options).peak_bytes - simulator.run(()).peak_bytes + found.peak_bytes
    planned = Fitting(step, Request(steps=1), lambda _: None).run_planned(plan_of(options))
    assert predicted == pytest.approx(planned.peak_bytes, rel=0.02)


def test_a_span_without_backward_costs_nothing() -> None:
    torch.manual_seed(0)
    _, profile = trial(STEPS["blocks"]())
    last = len(profile.operators)
    option = Option("recompute", "nowhere", (Span(last - 1, last),))
    simulator = Simulator(profile)
    assert simulator.run([option]) == simulator.run(())


@pytest.mark.parametrize("name", STEPS)
def test_search_is_feasible_monotone_and_apart(name: str) -> None:
    torch.manual_seed(0)
    _, profile = trial(STEPS[name]())
    simulator = Simulator(profile)
    search = Search(simulator, TECHNIQUE.options(profile))
    whole, floor = simulator.run(()).peak_bytes, search.smallest().outcome.peak_bytes
    assert floor < 0.95 * whole
    seconds = 0.0
    for share in (1.0, 0.9, 0.8, 0.7):
        budget = floor + int((whole - floor) * share)
        choice = search.cheapest(budget)
        assert choice is not None
        assert choice.outcome.peak_bytes <= budget
        spans = sorted(span for option in choice.options for span in option.spans)
        assert all(a.last <= b.first for a, b in itertools.pairwise(spans))
        assert choice.outcome.added_seconds >= seconds * 0.5
        seconds = choice.outcome.added_seconds
    assert search.cheapest(floor // 2) is None
