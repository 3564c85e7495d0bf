"""A budget is not refused because of a technique that saves less than it says."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

from steps import squared, train_step
from torchtrim import TrainStep, techniques
from torchtrim.executor.registry import technique
from torchtrim.planner.plans import build_plan
from torchtrim.records.budget import memory_limit
from torchtrim.records.plan import Prediction, Technique
from torchtrim.records.terms import Terms
from torchtrim.records.trial import Request
from torchtrim.techniques.split_matmul import running
from torchtrim.workflows.optimize import fitting
from torchtrim.workflows.optimize.fitting import Fit, Fitting
from torchtrim.workflows.optimize.levers import out_of_reach
from torchtrim.workflows.optimize.trials import PlanOutcome, suspects


class Block(nn.Module):
    """What can be computed again, and of what the technique makes promises."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(32, 128), nn.Linear(128, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.b(torch.tanh(self.a(x)))


WASTES = pytest.mark.parametrize("_liar", [True], indirect=True, ids=["wastes"])
EITHER = pytest.mark.parametrize(
    "_liar", [False, True], indirect=True, ids=["saves nothing", "wastes"]
)


@pytest.fixture
def _liar(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> Iterator[None]:
    """A technique that promises more than it keeps, dropped in."""
    source = Path(__file__).parents[2] / "techniques" / "promises.py"
    shutil.copy(source, tmp_path)
    monkeypatch.setattr(techniques, "__path__", [*techniques.__path__, str(tmp_path)])
    sys.modules[type(technique("promises")).__module__].WASTES[0] = request.param
    yield
    sys.modules.pop("torchtrim.techniques.promises", None)


def fitted(memory: str, terms: Terms | None = None) -> Fit:
    torch.manual_seed(0)
    model = nn.Sequential(*(Block() for _ in range(6)))
    step = TrainStep(model, squared, torch.optim.SGD(model.parameters(), 0.1), torch.randn(256, 32))
    return Fitting(step, Request(steps=1), lambda _: None, terms or Terms()).nearest(
        memory_limit(memory)
    )


@pytest.mark.slow
@EITHER
@pytest.mark.usefixtures("_liar")
def test_a_budget_that_honest_techniques_meet_is_met() -> None:
    found = fitted("58%")
    assert found.missed is None
    assert found.certificate is not None
    assert found.certificate.verdict == "BITWISE"
    assert found.planned is not None
    assert found.planned.peak_bytes <= found.budget.bytes
    assert "promises" not in {one.name for one in found.plan.techniques}
    assert any("promises" in note and "saved less" in note for note in found.notes)


@pytest.mark.slow
@WASTES
@pytest.mark.usefixtures("_liar")
def test_what_was_not_tried_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fitting, "_MOST_RECONSIDERED", 0)
    found = fitted("58%")
    assert found.missed is not None
    assert "after 0 more plans, others predicted to need less were not tried" in found.notes


@pytest.mark.slow
@WASTES
@pytest.mark.usefixtures("_liar")
def test_a_refusal_names_no_floor_above_its_own_levers() -> None:
    found = fitted("2%")
    assert found.missed is not None
    assert found.missed.levers
    allowed = [one for one in found.missed.levers if not one.needs]
    assert found.missed.smallest_bytes <= min(one.peak_bytes for one in allowed)
    assert "promises" not in {one.name for one in found.plan.techniques}


@pytest.mark.slow
def test_techniques_that_round_and_save_nothing_hide_no_exact_plan(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(running._InRows, "_run", lambda _, forward, *given: forward(*given))
    monkeypatch.setattr(fitting, "_MOST_RECONSIDERED", 1)
    others = ("micro_batch", "offload_activations")
    exact = fitted("30%", Terms(exclude=others))
    rounds = fitted("30%", Terms(allow="ROUNDING", exclude=others))
    assert exact.missed is not None
    assert rounds.missed is not None
    assert any("split_matmul" in note for note in rounds.notes)
    assert rounds.missed.smallest_bytes <= exact.missed.smallest_bytes


def outcome(used: int, simulated: int, *names: str) -> PlanOutcome:
    plan = build_plan(
        "Net",
        fingerprint={},
        techniques=tuple(Technique(name=name, where=("Net",)) for name in names),
        predicted=Prediction(peak_bytes=simulated, step_seconds=1.0),
        budget_bytes=100,
    )
    return PlanOutcome(plan, used, simulated)


def test_who_is_to_blame() -> None:
    held = outcome(100, 100, "recompute")
    missed = outcome(150, 100, "recompute", "overwrite")
    both = outcome(150, 100, "replay", "overwrite")
    assert suspects([held]) == []
    assert suspects([held, missed]) == [{"overwrite"}]
    assert suspects([missed]) == [{"overwrite"}, {"recompute"}, {"overwrite", "recompute"}]
    assert suspects([held, missed, both])[-1] == {"overwrite", "replay"}


@pytest.mark.slow
def test_a_budget_below_what_stays_is_said_after_the_first_run_and_tried_once() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(*[nn.Sequential(nn.Linear(64, 8), nn.Linear(8, 64)) for _ in range(3)])
    told: list[str] = []
    tried = Fitting(train_step(net, torch.randn(2048, 64)), Request(steps=1), told.append)
    fit = tried.nearest(memory_limit("300KB"))
    assert fit.missed is not None
    said = next(line for line in told if "no plan is expected to meet" in line)
    assert "inputs 512 KiB" in said
    assert told.index(said) < next(n for n, line in enumerate(told) if "planned" in line)
    assert len(tried._tried) == 1
    assert any("looking for the smallest peak" in note for note in fit.notes)
    assert not out_of_reach(fit.original, memory_limit("600KB").budget(fit.original.peak_bytes))
