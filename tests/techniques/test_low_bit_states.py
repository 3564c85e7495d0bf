"""States of few bits: torchao's codes, what a person writes by hand, saved and loaded to the bit."""

from __future__ import annotations

import copy
import importlib.util
from typing import Any

import pytest
import torch
from torch import nn

import torchtrim
from steps import squared, train_step
from torchtrim.errors import ApplyFailed
from torchtrim.records.budget import memory_limit
from torchtrim.records.plan import Technique
from torchtrim.records.terms import Terms
from torchtrim.records.trial import Request
from torchtrim.step.from_profile import step_of
from torchtrim.techniques.low_bit_states import narrow_bytes
from torchtrim.techniques.low_bit_states import states as narrow_states
from torchtrim.techniques.low_bit_states.technique import TECHNIQUE
from torchtrim.workflows.optimize.fitting import Fitting

needs_torchao = pytest.mark.skipif(
    importlib.util.find_spec("torchao") is None, reason="torchao is not installed"
)
STATES = ("8bit", "bf16")


def part_of(states: str, name: str = "AdamW") -> Technique:
    options: dict[str, str | int | float | bool] = {"states": states}
    return Technique(name="low_bit_states", where=(name,), options=options, equivalence="SEMANTIC")


class Run:
    """A loop with groups and a scheduler; a weight that is not contiguous, and a state too small."""

    def __init__(self, change: str = "", states: str = "8bit", **settings: Any) -> None:
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(48, 128), nn.Tanh(), nn.Linear(128, 32))
        self.net[2].weight.data = torch.randn(128, 32).div_(16).t()
        groups = [{"params": [*self.net[0].parameters()]}, {"params": [*self.net[2].parameters()]}]
        groups[1]["lr"] = 0.003
        self.optimizer = torch.optim.AdamW(groups, lr=0.01, **settings)
        self.scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, 50)
        self.handle: Any = None
        if change:
            self.handle = getattr(TECHNIQUE, change)({"AdamW": self.optimizer}, part_of(states))

    def train(self, first: int, last: int) -> float:
        for number in range(first, last):
            torch.manual_seed(number)
            x = torch.randn(16, 48)
            loss = (self.net(x) - x[:, :32].flip(1)).square().mean()
            loss.backward()
            self.optimizer.step()
            self.scheduler.step()
            self.optimizer.zero_grad()
        return loss.item()

    def saved(self) -> Any:
        parts = self.net, self.optimizer, self.scheduler
        return copy.deepcopy([part.state_dict() for part in parts])

    def load(self, states: Any) -> None:
        for part, state in zip((self.net, self.optimizer, self.scheduler), states, strict=True):
            part.load_state_dict(state)


def tensors_of(run: Run) -> list[torch.Tensor]:
    states = [run.optimizer.state[p] for p in run.net.parameters()]
    return [*run.net.parameters(), *(state[key] for state in states for key in sorted(state))]


def same(one: Run, other: Run) -> bool:
    pairs = zip(tensors_of(one), tensors_of(other), strict=True)
    return all(torch.equal(a, b) for a, b in pairs)


@needs_torchao
@pytest.mark.parametrize("states", STATES)
@pytest.mark.parametrize("settings", [{}, {"fused": True}, {"amsgrad": True, "foreach": True}])
def test_it_is_what_a_person_writes_and_the_program_draws_as_it_did(
    states: str, settings: dict[str, bool]
) -> None:
    plain, mine, by_hand = (
        Run(),
        Run("apply", states, **settings),
        Run("by_hand", states, **settings),
    )
    losses = [run.train(0, 12) for run in (plain, mine, by_hand)]
    drawn = torch.rand(4)
    assert same(mine, by_hand)
    assert losses[1] == losses[2] == pytest.approx(losses[0], rel=0.01)
    assert losses[1] != losses[0]
    torch.manual_seed(11)
    torch.randn(16, 48)
    assert torch.equal(torch.rand(4), drawn)
    assert mine.scheduler.state_dict() == by_hand.scheduler.state_dict()


@needs_torchao
@pytest.mark.parametrize("states", STATES)
def test_states_take_the_bytes_that_were_said(states: str) -> None:
    run = Run("apply", states)
    run.train(0, 1)
    for parameter in run.net.parameters():
        kept = sum(v.nbytes for k, v in run.optimizer.state[parameter].items() if k != "step")
        assert kept == 2 * narrow_bytes(parameter.numel(), 4, states)
    assert narrow_bytes(8192, 4, "8bit") == 8192 + 32 * 4
    assert narrow_bytes(8192, 4, "bf16") == 16384
    assert narrow_bytes(8200, 4, "8bit") == 4 * 8200
    assert narrow_bytes(100, 4, "bf16") == 400


@needs_torchao
def test_the_codes_are_those_that_torchao_keeps() -> None:
    """A step of torchao's own AdamW8bit from the same state; its arithmetic rounds otherwise."""
    narrow_states.torchao()
    from torchao.optim.subclass_8bit import OptimState8bit

    torch.manual_seed(0)
    value = torch.randn(3, 40, 256).square_()
    form = narrow_states.format_of({"states": "8bit"})
    for key, signed in (("exp_avg", True), ("exp_avg_sq", False)):
        theirs = OptimState8bit.zeros(value.shape, signed, 256)
        theirs.copy_(value)
        codes, scale = form.narrowed(key, value, (), 0)
        assert torch.equal(codes, theirs.codes.flatten())
        assert torch.equal(scale, theirs.scale)
        assert torch.equal(form.widened(key, (codes, scale), value), theirs.dequantize())


@needs_torchao
@pytest.mark.parametrize("states", STATES)
def test_saved_in_the_middle_it_goes_on_to_the_bit(states: str) -> None:
    whole, again = Run("apply", states), Run("apply", states)
    whole.train(0, 6)
    again.load(whole.saved())
    whole.train(6, 12)
    again.train(6, 12)
    assert same(whole, again)


@needs_torchao
@pytest.mark.parametrize("states", STATES)
def test_a_plain_optimizer_loads_it_and_it_loads_a_plain_one(states: str) -> None:
    mine, plain, back = Run("apply", states), Run(), Run("apply", states)
    mine.train(0, 6)
    plain.load(mine.saved())
    for parameter in plain.net.parameters():
        assert {*plain.optimizer.state[parameter]} == {"step", "exp_avg", "exp_avg_sq"}
    plain.train(6, 9)
    stale = plain.saved()
    stale[1]["low_bit_states"] = mine.saved()[1]["low_bit_states"]
    back.load(stale)
    fresh = Run("apply", states)
    fresh.load(plain.saved())
    assert same(back, fresh)
    back.train(9, 12)


@needs_torchao
@pytest.mark.parametrize(
    "beside", [7, {"states": "8bit"}, {"states": "8bit", "state": {0: {"exp_avg": 3}}}]
)
def test_what_lies_beside_a_state_and_is_none_is_passed_over(beside: Any) -> None:
    plain, mine, other = Run(), Run("apply"), Run("apply")
    plain.train(0, 2)
    saved = plain.saved()
    mine.load(saved)
    other.load([saved[0], {**saved[1], "low_bit_states": beside}, saved[2]])
    assert same(mine, other)


@needs_torchao
@pytest.mark.parametrize("states", STATES)
def test_reverting_before_a_step_leaves_no_trace_and_later_widens(states: str) -> None:
    run, plain = Run(), Run()
    for one in (run, plain):
        one.train(0, 3)
    handle = TECHNIQUE.apply({"AdamW": run.optimizer}, part_of(states))
    assert not same_keys(run, plain)
    handle.revert()
    assert same(run, plain)
    run.train(3, 5)
    plain.train(3, 5)
    assert same(run, plain)
    handle = TECHNIQUE.apply({"AdamW": run.optimizer}, part_of(states))
    run.train(5, 6)
    handle.revert()
    assert same_keys(run, plain)
    assert not run.optimizer._optimizer_state_dict_post_hooks
    run.train(6, 7)


def same_keys(one: Run, other: Run) -> bool:
    first, second = (run.optimizer.state[run.net[0].weight] for run in (one, other))
    return first.keys() == second.keys()


@needs_torchao
def test_a_closure_runs_once_with_gradients() -> None:
    run = Run("apply")
    calls = []

    def closure() -> torch.Tensor:
        calls.append(1)
        loss = squared(run.net, torch.ones(2, 48))
        loss.backward()
        return loss

    assert run.optimizer.step(closure) > 0
    assert calls == [1]
    assert "exp_avg_codes" in run.optimizer.state[run.net[0].weight]


def wide_step(kind: str = "AdamW") -> torchtrim.TrainStep:
    torch.manual_seed(0)
    net = nn.Sequential(*(nn.Linear(256, 256) for _ in range(4)))
    return train_step(net, torch.randn(8, 256), kind)


def pinned() -> Fitting:
    others = ("plain_optimizer", "optimizer_in_backward", "recompute", "replay")
    return Fitting(
        wide_step(),
        Request(steps=2),
        lambda _: None,
        Terms(allow="semantic=low_bit_states", exclude=others, pins={"low_bit_states": ["AdamW"]}),
    )


@pytest.mark.slow
@needs_torchao
def test_it_is_planned_and_certified_as_asked() -> None:
    fit = pinned().nearest(memory_limit("85%"))
    assert fit.missed is None
    assert fit.certificate is not None
    assert fit.planned is not None
    assert fit.plan.techniques == (part_of("8bit"),)
    assert fit.certificate.verdict == "AS ASKED", fit.certificate.reason
    assert fit.certificate.asked is not None
    assert fit.certificate.asked.others == "BITWISE"
    assert fit.planned.peak_bytes == pytest.approx(fit.plan.predicted.peak_bytes, rel=0.01)
    assert "where the original's is" in fit.certificate.reason


@needs_torchao
@pytest.mark.slow
def test_a_fault_in_it_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    fitting = pinned()
    fit = fitting.nearest(memory_limit("85%"))
    run = narrow_states.NarrowStates._run
    monkeypatch.setattr(
        narrow_states.NarrowStates, "_run", lambda self, step: run(self, twice(step))
    )
    assert fitting.verify(fit.original, fit.plan).verdict == "NOT EQUAL"


def twice(step: Any) -> Any:
    return lambda: (step(), step())


def test_what_has_no_low_bit_states_is_refused() -> None:
    net = nn.Linear(4, 4)
    with pytest.raises(ApplyFailed, match="one of 8bit, bf16"):
        TECHNIQUE.apply({}, part_of("4bit"))
    if importlib.util.find_spec("torchao") is not None:
        sgd = torch.optim.SGD(net.parameters())
        with pytest.raises(ApplyFailed, match=r"torch.optim.sgd.SGD, but torchao has"):
            TECHNIQUE.apply({"SGD": sgd}, part_of("8bit", "SGD"))
    assert "plain_optimizer" in TECHNIQUE.bars(part_of("8bit"))


def test_without_torchao_it_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    narrow_states.torchao.cache_clear()
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    with pytest.raises(ApplyFailed, match=r"pip install .torchtrim\[torchao\]"):
        TECHNIQUE.apply({}, part_of("8bit"))


@pytest.mark.parametrize("kind", ["AdamW", "SGD"])
def test_it_is_offered_for_an_adam_whose_states_would_be_smaller(kind: str) -> None:
    trial = Fitting(wide_step(kind), Request(steps=1), lambda _: None).observe()
    assert trial.profile is not None
    found = TECHNIQUE.options(step_of(trial.profile, 0.01))
    ways = [dict(one.settings)["states"] for one in found]
    assert ways == (["8bit", "bf16"] if kind == "AdamW" else [])


@needs_torchao
@pytest.mark.parametrize("change", ["apply", "by_hand"])
def test_states_of_frozen_parameters_stay_as_they_are(change: str) -> None:
    run = Run(change)
    run.train(0, 3)
    run.net[0].requires_grad_(False)
    # Step hooks that come later see whole steps.
    run.optimizer.register_step_post_hook(lambda *_: None)
    state = run.optimizer.state[run.net[0].weight]
    before = {key: value.clone() for key, value in state.items()}
    run.train(3, 6)
    assert before.keys() == state.keys()
    assert all(torch.equal(state[key], value) for key, value in before.items())
