"""Learning rates that follow the batch: schedulers go on as they were, and the factor is reached by a
warm-up."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import torchtrim
from steps import squared, train_step
from torchtrim.errors import ApplyFailed
from torchtrim.executor.stepping import factor_at
from torchtrim.planner.plans import rates_plan
from torchtrim.records.estimate import GrowthLimit
from torchtrim.records.plan import Technique
from torchtrim.records.trial import Request
from torchtrim.techniques.scale_lr import TECHNIQUE, lr_techniques, settings_of
from torchtrim.workflows.optimize.fitting import Fitting


def part_of(name: str = "SGD", **options: Any) -> Technique:
    given = {"from_batch": 8, "to_batch": 32, "rule": "linear", "warmup": 0, **options}
    return Technique(name="scale_lr", where=(name,), options=given, equivalence="SEMANTIC")


def network() -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(5, 3)


SCHEDULERS = {
    "steps": lambda one: torch.optim.lr_scheduler.StepLR(one, 2, 0.5),
    "cosine": lambda one: torch.optim.lr_scheduler.CosineAnnealingLR(one, 6),
    "function": lambda one: torch.optim.lr_scheduler.LambdaLR(one, lambda n: 1 / (n + 1)),
    "cycle": lambda one: torch.optim.lr_scheduler.OneCycleLR(one, 0.1, total_steps=8),
}


def trained(net: nn.Module, optimizer: torch.optim.Optimizer, kind: str, times: Any) -> list[float]:
    """The rates that the groups showed; with `times` each step is at so many times the rate."""
    scheduler, shown = SCHEDULERS[kind](optimizer), []
    for number in range(6):
        torch.manual_seed(number)
        squared(net, torch.randn(4, 5)).backward()
        (group,) = optimizer.param_groups
        shown.append(group["lr"])
        group["lr"] *= times(number) if times else 1
        optimizer.step()
        group["lr"] = shown[-1]
        optimizer.zero_grad()
        scheduler.step()
    return shown


@pytest.mark.parametrize("kind", SCHEDULERS)
@pytest.mark.parametrize("change", ["apply", "by_hand"])
@pytest.mark.parametrize("warmup", [0, 3])
def test_each_step_is_at_that_rate_and_schedulers_see_their_own(
    kind: str, change: str, warmup: int
) -> None:
    nets = network(), network()
    plain, planned = (torch.optim.SGD(net.parameters(), 0.05) for net in nets)
    handle = getattr(TECHNIQUE, change)({"SGD": planned}, part_of(warmup=warmup))
    times = lambda number: factor_at(number + 1, 4.0, warmup)  # noqa: E731
    assert trained(nets[0], plain, kind, times) == trained(nets[1], planned, kind, None)
    handle.revert()
    assert all(torch.equal(a, b) for a, b in zip(*(n.parameters() for n in nets), strict=True))
    assert plain.state_dict()["param_groups"] == planned.state_dict()["param_groups"]
    assert not planned._optimizer_step_pre_hooks


def test_the_factor_is_that_of_the_rule_and_is_reached_in_a_line() -> None:
    assert settings_of(part_of()) == (4.0, 0)
    assert settings_of(part_of(rule="sqrt", warmup=7)) == (2.0, 7)
    assert settings_of(part_of(to_batch=2)) == (0.25, 0)
    assert [factor_at(step, 5.0, 3) for step in range(1, 6)] == [2.0, 3.0, 4.0, 5.0, 5.0]
    assert factor_at(1, 5.0, 0) == 5.0


@pytest.mark.parametrize(
    "options",
    [{"from_batch": 0}, {"to_batch": "8"}, {"rule": "cubic"}, {"warmup": -1}, {"from_batch": True}],
)
def test_options_that_are_none_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ApplyFailed, match="scale_lr has the options"):
        settings_of(part_of(**options))


def test_the_plan_of_a_batch_that_was_found_is_certified_as_asked() -> None:
    step = train_step(network(), torch.randn(4, 5), "AdamW")
    fitting = Fitting(step, Request(steps=2), lambda _: None)
    original = fitting.observe()
    assert original.profile is not None
    growth = GrowthLimit(
        what="batch", now=4, largest=16, budget_bytes=10_000, peak_bytes=9_000, next_bytes=None
    )
    plan = rates_plan(original.profile, lr_techniques(original.profile, 4, 16), growth, 10_000)
    assert plan is not None
    (part,) = plan.techniques
    assert (part.where, part.options["rule"]) == (("AdamW",), "sqrt")
    certificate = fitting.verify(original, plan)
    assert certificate.verdict == "AS ASKED", certificate.reason
    assert certificate.asked is not None
    assert certificate.asked.others == "BITWISE"


def test_no_plan_for_a_budget_has_it() -> None:
    step = train_step(network(), torch.randn(4, 5), "AdamW")
    plan = torchtrim.plan(step, "100%", allow="semantic=scale_lr")
    assert plan.techniques == ()


@pytest.mark.slow
def test_find_batch_writes_it_where_it_is_allowed(tmp_path: Path) -> None:
    from torchtrim.api import find_batch_report

    (tmp_path / "train.py").write_text(LOADS)
    script = torchtrim.Script(str(tmp_path / "train.py"))
    found = find_batch_report(script, "2MiB", allow="semantic=scale_lr")
    assert found.plan is not None
    assert found.report.estimated is not None
    (growth,) = found.report.estimated.growth
    (part,) = found.plan.techniques
    assert part.options == {
        **{"from_batch": 4, "to_batch": growth.largest},
        **{"rule": "linear", "warmup": 300},
    }


LOADS = """
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

net = nn.Linear(64, 64)
optimizer = torch.optim.SGD(net.parameters(), 0.1)
for (x,) in DataLoader(TensorDataset(torch.randn(4096, 64)), batch_size=4):
    net(x).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""
