"""A plan's names mean the same operators whatever other techniques it holds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import msgspec
import pytest
import torch
import torch.nn.functional as F
from test_pairs import ELSEWHERE, applied, loss_of, offers, workload
from torch import nn

from steps import encoder, fitting, train_step
from torchtrim.emulator import emulate
from torchtrim.executor.ordinals import Counting, is_numbered, unnumbered
from torchtrim.executor.registry import names, technique
from torchtrim.records.budget import Budget
from torchtrim.records.plan import Technique
from torchtrim.step import from_profile, simulate

OTHER_OPERATORS = {"chunked_loss", "overwrite", "precision", "replace_norm"}
"""What these run in place of the program's own is known to the step that is planned, or comes last in it."""


def operators(function: Callable[[], object]) -> Counter[str]:
    """How many of each name run with a number; not what hooks detach."""
    with Counting() as counting:
        function()
    del counting.counts["aten::detach"]
    return counting.counts


def counted(*plans: Technique, steps: int) -> Counter[str]:
    """What runs in forward with these techniques, after some steps."""
    with emulate():
        step = workload()
        applied(step, plans)
        for number in range(steps):
            step.step(number)
        return operators(lambda: loss_of(step.model, step.batch))


@pytest.mark.parametrize("name", sorted({*names()} - ELSEWHERE - OTHER_OPERATORS))
def test_a_technique_leaves_the_numbers_of_operators_as_they_are(name: str) -> None:
    for steps in (0, 1):
        plain = counted(steps=steps)
        for offer in offers(name)[::4]:
            assert counted(offer.plan, steps=steps) == plain, offer.plan.where


class Losses(nn.Module):
    """Two means, one of them of what is counted."""

    def __init__(self) -> None:
        super().__init__()
        self.classes = nn.Linear(8, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found = self.classes(x)
        right = torch.zeros(len(x), dtype=torch.long)
        return (found * found).mean() + F.cross_entropy(found, right, torch.ones(5))


class Recurrent(nn.Module):
    def __init__(self, kind: type[nn.RNNBase]) -> None:
        super().__init__()
        self.memory = kind(8, 8, 2, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.memory(x)[0]


def block() -> nn.Module:
    return nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True)


INSIDE = {
    "attention in 2 parts": (block, "Net.self_attn", "micro_batch", {"parts": 2}, (4, 6, 8)),
    "attention in parts of one": (block, "Net.self_attn", "micro_batch", {"parts": 4}, (4, 6, 8)),
    "losses": (lambda: nn.Sequential(Losses()), "Net.0", "micro_batch", {"parts": 2}, (4, 8)),
    "lstm": (lambda: Recurrent(nn.LSTM), "Net.memory", "split_time", {}, (4, 6, 8)),
    "gru": (lambda: Recurrent(nn.GRU), "Net.memory", "split_time", {}, (4, 6, 8)),
}


@pytest.mark.parametrize("case", INSIDE)
def test_the_program_s_own_operators_are_counted_where_others_run(case: str) -> None:
    make, where, name, options, shape = INSIDE[case]
    model, x = make(), torch.randn(shape, requires_grad=True)
    plain = operators(lambda: model(x))
    plan = Technique(name=name, where=(where,), options=options, equivalence="ROUNDING")
    technique(name).apply({"Net": model}, plan)
    for _ in range(2):
        assert operators(lambda: model(x)) == plain


@pytest.mark.parametrize("parts", [2, 16])
def test_what_is_named_after_a_part_of_a_block_is_replayed_where_that_part_runs_in_parts(
    parts: int,
) -> None:
    torch.manual_seed(0)
    fit = fitting(train_step(encoder(64, 3), torch.randn(16, 48, 64), "SGD"))
    original = fit.observe()
    assert original.profile is not None
    place, step = "TransformerEncoder.layers.1", from_profile.step_of(original.profile)
    plans = (
        Technique(name="micro_batch", where=(f"{place}.self_attn",), options={"parts": parts}),
        Technique(name="replay", where=(f"{place}:layer_norm.0,addmm.1,relu.0",)),
    )
    edits = [
        edit
        for plan in plans
        for option in technique(plan.name).options(step)
        if (option.where,) == plan.where
        and dict(option.settings) == plan.options
        and (edit := technique(plan.name).edits(step, option)) is not None
    ]
    assert len(edits) == len(plans)
    unchanged = fit.planner(original).unchanged(Budget(original.peak_bytes))
    planned = fit.run_planned(msgspec.structs.replace(unchanged, techniques=plans))
    assert planned.peak_bytes == simulate.simulate(step, edits).peak_bytes < original.peak_bytes


def test_a_part_of_a_part_has_numbers_only_where_both_have() -> None:
    with unnumbered() as outer:
        assert not is_numbered()
        for own in (True, False):
            with outer(own), unnumbered() as inner, inner(True):
                assert is_numbered() is own
    assert is_numbered()
