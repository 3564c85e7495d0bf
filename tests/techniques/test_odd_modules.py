"""Every technique examines steps whose modules return scalars, empty tensors, tuples, dicts or None."""

from __future__ import annotations

import pytest

from odd_modules import LAYERS, profile_of, step_of
from torchtrim import InfeasibleBudget
from torchtrim.executor.registry import names, technique
from torchtrim.planner.planner import Planner
from torchtrim.records.budget import memory_limit
from torchtrim.records.terms import Terms
from torchtrim.records.trial import Request
from torchtrim.step.from_profile import step_of as read_step
from torchtrim.step.simulate import simulate
from torchtrim.techniques.split_matmul.technique import modules_of
from torchtrim.workflows.optimize.fitting import Fitting


@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("name", names())
def test_each_technique_says_what_it_offers(name: str, layer: str) -> None:
    step, unit = read_step(profile_of(layer)), technique(name)
    options = [*unit.options(step), *getattr(unit, "to_files", lambda _: ())(step)]
    edits = [unit.edits(step, option) for option in options]
    assert all(simulate(step, [edit]).peak_bytes > 0 for edit in edits if edit is not None)
    assert all(getattr(unit, "refusals", lambda _: ())(step))


@pytest.mark.slow
@pytest.mark.parametrize("layer", LAYERS)
def test_the_planner_finds_the_smallest_peak(layer: str) -> None:
    planner = Planner(profile_of(layer), step_seconds=1.0, fingerprint={}, allow="ROUNDING")
    assert planner.floor.outcome.peak_bytes <= planner.simulated_original


def test_what_gives_a_scalar_has_no_rows() -> None:
    found = modules_of(read_step(profile_of("wide")))
    assert {"Odd.first", "Odd.odd.0.layer"} <= found.keys()
    assert not found.keys() & {"Odd", "Odd.odd.0"}


@pytest.mark.slow
def test_a_model_that_returns_its_own_loss_gets_a_plan_and_levers() -> None:
    fitting = Fitting(step_of("wide", "scalar"), Request(steps=2), print, Terms())
    found = fitting.nearest(memory_limit("10%"))
    assert isinstance(found.missed, InfeasibleBudget)
    assert found.certificate is None or found.certificate.verdict == "BITWISE"
    assert "split_matmul" in {lever.technique for lever in found.levers}
