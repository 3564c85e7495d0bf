"""A plan made on one device applies on another, place by place, and computes the same bits."""

from __future__ import annotations

import functools
import itertools

import pytest
from msgspec.structs import replace

import torchtrim
from torchtrim.executor.registry import technique
from torchtrim.planner.pins import overlap
from torchtrim.records.plan import Plan, Prediction, Technique
from torchtrim.step.edits import Edit
from torchtrim.step.from_profile import step_of
from travelling import DEVICES, MODELS, Travelled, left, on, planned, run


@functools.cache
def replayed(device: str, name: str) -> Plan:
    """All that `replay` can do in a model at once."""
    with on(device, MODELS[name]) as work:
        step = step_of(torchtrim.record(work))
    unit, edits, where = technique("replay"), list[Edit](), []
    for option in unit.options(step):
        edit = unit.edits(step, option)
        if edit is not None and not any(overlap(edit.claims, other.claims) for other in edits):
            edits.append(edit)
            where.append(option.where)
    return Plan(
        torchtrim="0.1.0",
        script="",
        fingerprint={},
        budget_bytes=1,
        techniques=(Technique(name="replay", where=tuple(where)),),
        predicted=Prediction(peak_bytes=1, step_seconds=1.0),
    )


@functools.cache
def plain(device: str, name: str) -> Travelled:
    return run(device, MODELS[name])


@functools.cache
def thorough(device: str, name: str) -> Plan:
    return planned(device, MODELS[name])


@pytest.mark.parametrize("name", ["mlp", "llama", "dense"])
def test_a_plan_goes_from_a_cpu_to_a_gpu_and_back(name: str) -> None:
    for here, there in itertools.permutations(("cpu", "a100")):
        plan = replayed(here, name)
        found = run(there, MODELS[name], plan)
        assert found.digest == plain(there, name).digest
        assert left(found) < len(plan.techniques[0].where)
        assert left(run(here, MODELS[name], plan)) == 0


def test_a_place_inside_another_kernel_is_named_and_all_others_apply() -> None:
    plan = replayed("cpu", "mlp")
    noise = [one for one in plan.techniques[0].where if "dropout-div_" in one]
    found = run("a100", MODELS["mlp"], plan)
    assert left(found) == len(noise) > 0
    assert all(
        "empty_like.0 is part of a kernel" in said or "may not rerun" in said for said in found.said
    )


def test_attention_that_draws_numbers_never_reruns() -> None:
    """The CPU's last product of attention is a whole kernel with dropout on a GPU."""
    place = "Blocks:scaled_dot_product_attention.0,scaled_dot_product_attention.1"
    (unit,) = replayed("cpu", "mlp").techniques
    plan = replace(replayed("cpu", "mlp"), techniques=(replace(unit, where=(place,)),))
    name = "gpt with dropout"
    found = run("a100", MODELS[name], plan)
    assert found.digest == plain("a100", name).digest
    assert "may not rerun" in found.said[0]


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_plans_travel_between_all_devices(name: str) -> None:
    for here, there in itertools.permutations(DEVICES, 2):
        found = run(there, MODELS[name], thorough(here, name))
        assert found.digest == plain(there, name).digest, (here, there)
