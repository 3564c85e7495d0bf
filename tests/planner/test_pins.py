"""What a person pins holds in every plan; what cannot hold is told."""

from __future__ import annotations

import math
from functools import cache

import pytest
import torch

from steps import ConvNet, Fitting, Request, fitting, images, quiet, train_step, trial
from torchtrim import InfeasibleBudget, fit
from torchtrim.errors import PlannedStepFailed, UsageError
from torchtrim.planner.pins import compile_pattern
from torchtrim.planner.planner import Planner
from torchtrim.records.budget import Budget, memory_limit
from torchtrim.records.plan import Plan
from torchtrim.records.profile import Profile
from torchtrim.records.terms import Terms
from torchtrim.step.from_profile import step_of
from torchtrim.step.rerun import rerun
from torchtrim.step.simulate import simulate
from torchtrim.workflows.optimize.trials import barred, pins_for, split_pins

PINS = [
    {"keep": ["*.blocks.1", "*.blocks.3.conv"]},
    {"recompute": ["*.blocks.2", "*.blocks.5.norm"]},
]


@cache
def profile() -> Profile:
    torch.manual_seed(0)
    return trial(train_step(ConvNet(), images()))[1]


def planner_of(pins: dict[str, list[str]]) -> Planner:
    seen = profile()
    return Planner(seen, step_seconds=seen.step_seconds, fingerprint={}, pins=pins)


def places(plan: Plan, name: str = "recompute") -> list[str]:
    return [where for one in plan.techniques if one.name == name for where in one.where]


def touches(where: str, kept: str) -> bool:
    return where == kept or where.startswith(f"{kept}.") or kept.startswith(f"{where}.")


@pytest.mark.slow
@pytest.mark.parametrize("pins", PINS)
def test_pins_hold_at_every_budget_and_a_looser_one_is_never_slower(
    pins: dict[str, list[str]],
) -> None:
    planner = planner_of(pins)
    low, high = planner.floor.outcome.peak_bytes, planner.simulated_original
    before = math.inf
    for number in range(11):
        plan = planner.plan(Budget(max(low + (high - low) * number // 10, low)))
        found = places(plan)
        for pattern in pins.get("keep", ()):
            assert not any(touches(where, pattern.replace("*", "ConvNet")) for where in found)
        for pattern in pins.get("recompute", ()):
            assert pattern.replace("*", "ConvNet") in found
        assert plan.predicted.step_seconds <= before
        assert plan.bound_seconds is not None
        assert plan.bound_seconds <= plan.predicted.step_seconds + 1e-12
        assert {what: list(texts) for what, texts in plan.pins.items()} == pins
        before = plan.predicted.step_seconds


def test_what_is_pinned_is_simulated_with_what_is_chosen() -> None:
    planner = planner_of({"recompute": ["*.blocks.2"]})
    seen = profile()
    step = step_of(seen, seen.step_seconds)
    calls = [c.span for c in step.calls if step.modules[c.module].path == "ConvNet.blocks.2"]
    edit = rerun(step, calls)
    assert edit is not None
    whole = planner.plan(Budget(2**60))
    assert places(whole) == ["ConvNet.blocks.2"]
    assert whole.predicted.step_seconds == pytest.approx(step.seconds + edit.seconds)
    assert whole.predicted.peak_bytes == simulate(step, [edit]).peak_bytes


def test_of_nested_places_that_a_pattern_names_the_outermost_is_meant() -> None:
    plan = planner_of({"recompute": ["ConvNet.blocks.*"]}).plan(Budget(2**60))
    assert places(plan) == [f"ConvNet.blocks.{number}" for number in range(6)]


@pytest.mark.slow
def test_a_floor_below_says_what_the_pins_cost() -> None:
    free, pinned = planner_of({}), planner_of({"keep": ["*.blocks.*"]})
    lowest = free.floor.outcome.peak_bytes
    assert pinned.floor.outcome.peak_bytes > lowest
    with pytest.raises(InfeasibleBudget, match=r"Without \[pins\]") as caught:
        pinned.plan(Budget(lowest))
    assert caught.value.smallest_bytes == pinned.floor.outcome.peak_bytes
    with pytest.raises(InfeasibleBudget) as without:
        free.plan(Budget(lowest - 1))
    assert "[pins]" not in str(without.value)


@pytest.mark.parametrize(
    ("pins", "said"),
    [
        ({"keep": ["*.attn"]}, r"matches no module that the step calls. Known places: ConvNet"),
        ({"keep": ["ConvNet.block.1"]}, r"Known places: ConvNet.blocks.1"),
        ({"recompute": ["*.nothing"]}, r"No such place. It can be pinned at ConvNet"),
        ({"recompute": ["*.head"]}, r"recompute saves nothing at ConvNet.head"),
        ({"recompte": ["*"]}, r"is not a technique. Use keep"),
        ({"relative_attention": ["*"]}, r"is not allowed; see --allow"),
        ({"keep": ["*.conv"], "recompute": ["*.2"]}, r"keeps `ConvNet.blocks.2.conv`"),
        ({"recompute": ["*.2", "*.2.norm"]}, r"one runs inside the other"),
        ({"never": ["*.conv"]}, r"Write TECHNIQUE:PLACE, such as 'recompute:\*.attn'"),
        ({"never": ["replay:*.attn"]}, r"no place of replay. Known places: ConvNet"),
        ({"never": ["recompute:*.2"], "recompute": ["*.2"]}, r"\['recompute:\*.2'\] forbids that"),
    ],
)
def test_pins_that_cannot_be_meant(pins: dict[str, list[str]], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        planner_of(pins)


@pytest.mark.parametrize(
    ("pattern", "meant"),
    [
        ("*.attn", {"Net.attn", "Net.a.attn"}),
        ("Net.?", {"Net.a", "Net.b"}),
        ("N*.a*n", {"Net.attn", "Net.a.attn"}),
        ("*", {"Net.attn", "Net.a.attn", "Net.a", "Net.b"}),
        ("Net.b[*]", {"Net.b[0:2]", "Net.b[2:4]"}),
        ("Net.b[0:2]", {"Net.b[0:2]"}),
        ("Net", set()),
        ("*a" * 40, set()),
    ],
)
def test_what_a_pattern_means(pattern: str, meant: set[str]) -> None:
    known = ("Net.attn", "Net.a.attn", "Net.a", "Net.b", "Net.b[0:2]", "Net.b[2:4]", "a" * 39)
    assert {where for where in known if compile_pattern(pattern).fullmatch(where)} == meant | (
        {"a" * 39} if pattern == "*" else set()
    )


@pytest.mark.slow
def test_a_technique_is_forbidden_at_one_place_and_others_there_are_not() -> None:
    pins = {"never": ["recompute:*.blocks.1", "split_channels"], "recompute": ["*.blocks.2"]}
    planner = planner_of(pins)
    low, high = planner.floor.outcome.peak_bytes, planner.simulated_original
    found = [planner.plan(Budget(low + (high - low) * number // 8)) for number in range(8)]
    assert {where for plan in found for where in places(plan)} >= {"ConvNet.blocks.2"}
    assert not any(touches(where, "ConvNet.blocks.1") for plan in found for where in places(plan))
    replayed = {where.partition(":")[0] for plan in found for where in places(plan, "replay")}
    assert any(touches(where, "ConvNet.blocks.1") for where in replayed - {"ConvNet"})
    assert not any(places(plan, "split_channels") for plan in found)
    assert planner.pinned.note().endswith(
        "never recompute at *.blocks.1; never split_channels at *"
    )


@pytest.mark.slow
def test_a_place_that_a_plan_names_is_forbidden_alone() -> None:
    first = next(w for w in places(planner_of({}).floor_plan(Budget(0)), "replay"))
    without = planner_of({"never": [f"replay: {first}"]}).floor_plan(Budget(0))
    assert first not in places(without, "replay")
    assert places(without, "replay")


def test_pins_that_forbid_reach_techniques_alone_and_measured_ones() -> None:
    pins = {"never": ["replay:Net.a", "precision"], "keep": ["Net.b"], "recompute": ["Net.c"]}
    assert pins_for("replay", pins) == {"never": ["replay:Net.a"], "keep": ["Net.b"]}
    assert pins_for("recompute", pins) == {"keep": ["Net.b"], "recompute": ["Net.c"]}
    assert split_pins(pins) == ({**pins, "never": ["replay:Net.a"]}, {})
    step = train_step(ConvNet(blocks=1), images(count=2))
    original = fitting(step).observe()
    assert barred(original, pins) == {"precision:ConvNet"}


@pytest.mark.slow
def test_a_range_is_meant_where_a_pattern_says_so() -> None:
    from steps import flat

    torch.manual_seed(0)
    seen = trial(train_step(flat(), images()))[1]

    def planner(pattern: str) -> Planner:
        pins = {"recompute": [pattern]}
        return Planner(seen, step_seconds=seen.step_seconds, fingerprint={}, pins=pins)

    (where, *_) = (w for w in places(planner("Sequential").floor_plan(Budget(0))) if "[" not in w)
    assert where == "Sequential"
    free = Planner(seen, step_seconds=seen.step_seconds, fingerprint={}, exclude=("replay",))
    ranges = [w for w in places(free.floor_plan(Budget(0))) if "[" in w]
    assert ranges
    assert places(planner(ranges[0]).plan(Budget(2**60))) == ranges[:1]


def test_a_live_model_is_fitted_with_what_is_pinned() -> None:
    torch.manual_seed(0)
    step = train_step(ConvNet(), images())
    pins = {"keep": ["*.blocks.0"], "recompute": ["*.blocks.4"]}
    with fit(step, "100%", steps=1, pins=pins) as fitted:
        assert places(fitted.plan) == ["ConvNet.blocks.4"]
        assert fitted.certificate is not None
        assert fitted.certificate.verdict == "BITWISE"


def test_a_pinned_place_that_fails_is_told() -> None:
    torch.manual_seed(0)
    step = train_step(ConvNet(), images())
    tried = Fitting(step, Request(steps=1), quiet, Terms(pins={"recompute": ["*.blocks.4"]}))
    run = tried.run_planned

    def failing(plan: Plan, *_: int) -> object:
        if "ConvNet.blocks.4" in places(plan):
            error = PlannedStepFailed("it failed", place="ConvNet.blocks.4")
            error.plan = plan
            raise error
        return run(plan)

    tried.run_planned = failing  # type: ignore[method-assign, assignment]
    with pytest.raises(PlannedStepFailed, match=r"pinned under \[pins\], but fails there"):
        tried.nearest(memory_limit("90%"))
