"""A plan's names mean the same operators whatever other techniques it holds."""

from __future__ import annotations

from collections import Counter
from typing import Any

import msgspec
import pytest
import torch
from test_pairs import ELSEWHERE, applied, loss_of, offers, workload
from torch.utils._python_dispatch import TorchDispatchMode

from steps import encoder, fitting, train_step
from torchtrim.observe.emulated import emulate
from torchtrim.records.plan import Technique
from torchtrim.step import from_profile, simulate
from torchtrim.techniques.base import names, technique
from torchtrim.techniques.numbering import is_numbered, unnumbered

OTHER_OPERATORS = {"chunked_loss", "overwrite", "precision", "replace_norm"}
"""What these run in place of the program's own is known to the step that is planned, or comes last in it."""


class Numbered(TorchDispatchMode):
    """How many operators of each name run in forward with a number; not what hooks detach."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if is_numbered() and torch._C._current_autograd_node() is None:
            self.counts[func._schema.name] += 1
        return func(*args, **(kwargs or {}))


def counted(*plans: Technique, steps: int) -> Counter[str]:
    """What runs in forward with these techniques, after some steps."""
    with emulate():
        step = workload()
        applied(step, plans)
        for number in range(steps):
            step.step(number)
        with Numbered() as numbered:
            loss_of(step.model, step.batch(0) if callable(step.batch) else step.batch)
        del numbered.counts["aten::detach"]
        return numbered.counts


@pytest.mark.parametrize("name", sorted({*names()} - ELSEWHERE - OTHER_OPERATORS))
def test_a_technique_leaves_the_numbers_of_operators_as_they_are(name: str) -> None:
    for steps in (0, 1):
        plain = counted(steps=steps)
        for offer in offers(name)[::4]:
            assert counted(offer.plan, steps=steps) == plain, offer.plan.where


def test_what_is_named_after_a_part_of_a_block_is_replayed_where_that_part_runs_in_parts() -> None:
    torch.manual_seed(0)
    fit = fitting(train_step(encoder(64, 3), torch.randn(16, 48, 64), "SGD"))
    original = fit.observe()
    assert original.profile is not None
    block, step = "TransformerEncoder.layers.1", from_profile.step_of(original.profile)
    plans = (
        Technique(name="micro_batch", where=(f"{block}.self_attn",), options={"parts": 2}),
        Technique(name="replay", where=(f"{block}:native_layer_norm.0,addmm.1,relu.0",)),
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
    unchanged = fit.planner(original).unchanged(original.peak_bytes)
    planned = fit.run_planned(msgspec.structs.replace(unchanged, techniques=plans))
    assert planned.peak_bytes == simulate.simulate(step, edits).peak_bytes < original.peak_bytes


def test_a_part_of_a_part_has_numbers_only_where_both_have() -> None:
    with unnumbered() as outer:
        assert not is_numbered()
        for own in (True, False):
            with outer(own), unnumbered() as inner, inner(True):
                assert is_numbered() is own
    assert is_numbered()
