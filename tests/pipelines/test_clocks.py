"""Stages that are clocked: each action once a round, its gradients those of the micro-batch, nothing left."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import pytest
import torch
from msgspec.structs import replace

from pipelines.models import Gpt, batch, gradients, loss_of, pipeline
from torchtrim.executor.swap import Swapped
from torchtrim.pipelines import clocks
from torchtrim.pipelines.clocks import ActionClocks, clocking
from torchtrim.records.pipeline import Pipeline, Stage, StageSeconds

HALF = ("transformer.h.2",)
FOUR = ("transformer.h.1", "transformer.h.2", "transformer.h.3")


def clocked(model: Gpt, *pipelines: Pipeline) -> list[tuple[StageSeconds, ...]]:
    found: list[list[tuple[StageSeconds, ...]]] = []
    swapped = Swapped(model, clocking(model, pipelines, found.append).wrap)
    tokens, targets = batch()
    loss_of(model(tokens), targets).backward()
    swapped.revert()
    assert len(found) == 1
    return found[0]


def test_whole_backward_and_both_halves_make_the_gradients_of_a_micro_batch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One round goes through the stages twice: whole, and split."""
    monkeypatch.setattr(clocks, "_ROUNDS", 1)
    model = Gpt().double()
    whole = copy.deepcopy(model)
    clocked(model, pipeline(FOUR, "ZBVZeroBubble", 2))
    tokens, targets = (one[:2] for one in batch())
    (2 * loss_of(whole(tokens), targets) / 4).backward()
    ours, theirs = gradients(model), gradients(whole)
    assert ours.keys() == theirs.keys()
    assert all(torch.allclose(ours[name], theirs[name], atol=1e-14) for name in ours)


def test_each_pipeline_has_its_own_stages_and_the_first_stage_leaves_all_to_the_second_half() -> (
    None
):
    two, four = clocked(Gpt(), pipeline(HALF, "1F1B", 2), pipeline(FOUR, "ZBVZeroBubble", 2))
    assert [len(two), len(four)] == [2, 4]
    for stages in (two, four):
        assert all(min(one.forward, one.backward, one.weights) > 0 for one in stages)
        assert [one.inputs > 0 for one in stages] == [False] + [True] * (len(stages) - 1)


def test_a_stage_that_runs_again_is_clocked_whole_alone() -> None:
    kept = Stage(
        first="", rank=0, forward_seconds=0, backward_seconds=0, held_bytes=0, state_bytes=0
    )
    again = replace(pipeline(HALF, "1F1B", 2), stages=(kept, replace(kept, recompute=True)))
    (stages,) = clocked(Gpt(), again)
    assert all(one.backward > 0 and one.inputs == one.weights == 0 for one in stages)


def test_out_of_time_each_pipeline_has_had_one_round(monkeypatch: pytest.MonkeyPatch) -> None:
    """And one that had a second has that alone."""
    moments, rounds = itertools.count(), []
    plain = ActionClocks._round

    def noted(self: ActionClocks, step: Any, one: Pipeline, notes: Any) -> None:
        rounds.append(one.cuts)
        plain(self, step, one, notes)

    monkeypatch.setattr(ActionClocks, "_round", noted)
    monkeypatch.setattr(clocks.time, "monotonic", lambda: float(next(moments)))
    for patience, expected in ((0.5, [HALF, FOUR]), (1.5, [HALF, FOUR, HALF])):
        rounds.clear()
        monkeypatch.setattr(clocks, "_PATIENCE", patience)
        found = clocked(Gpt(), pipeline(HALF, "1F1B", 2), pipeline(FOUR, "1F1B", 2))
        assert rounds == expected
        assert all(one.forward > 0 for stages in found for one in stages)


def test_the_model_is_what_it_was() -> None:
    model = Gpt()
    tokens, targets = batch()
    before = loss_of(model(tokens), targets)
    clocked(model, pipeline(HALF, "1F1B", 2), pipeline(FOUR, "LoopedBFS", 2))
    assert torch.equal(loss_of(model(tokens), targets), before)
    assert type(model) is Gpt
