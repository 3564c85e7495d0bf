"""FSDP2 in the place of DistributedDataParallel, on two processes over gloo."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch

from profiles import Step
from techniques.replicas import ROOT, found_by
from torchtrim.errors import ApplyFailed
from torchtrim.records.plan import Technique
from torchtrim.records.profile import Kind, Phase
from torchtrim.step.from_profile import step_of
from torchtrim.techniques.shard.technique import TECHNIQUE

pytestmark = pytest.mark.slow  # The first of them starts the ranks.


@cache
def ranks() -> tuple[dict[str, Any], ...]:
    """What each rank found."""
    return found_by("techniques.sharded_replicas")


@pytest.mark.parametrize("kind", ["resharded", "kept", "accumulated", "later", "one block"])
def test_shards_train_as_the_whole_to_the_bit_and_are_taken_back(kind: str) -> None:
    for found in ranks():
        seen = found[kind]
        assert seen["apart"] == seen["reverted"] == 0
        assert seen["same"]
        assert seen["marks"]


def test_each_rank_keeps_half() -> None:
    for found in ranks():
        assert found["resharded"]["kept"] == pytest.approx(0.5, abs=0.01)


def test_files_are_whole_and_can_be_loaded() -> None:
    for found in ranks():
        assert found["saved"]["files"] == 0
        assert found["saved"]["loaded"] == 0


def test_what_a_module_of_a_sharded_one_saves_is_whole_too() -> None:
    """After a rank has asked alone and was told: the next meeting is of both again."""
    for found in ranks():
        assert not found["saved"]["a module"]
        assert found["saved"]["a module loaded"] == 0


def test_a_model_that_fully_shard_fails_at_is_as_it_was() -> None:
    for found in ranks():
        seen = found["failed"]
        assert "fully_shard failed: no room for another block" in seen["said"]
        assert seen["marks"]
        assert seen["apart"] == 0


def test_optimizers_made_later_or_found_in_another_order_are_taken_back() -> None:
    for found in ranks():
        assert found["later made"] == {"apart": 0, "back": [True] * 8}


def test_a_rank_that_saves_alone_is_told() -> None:
    assert "state_dict() was called on 1 of 2 ranks" in ranks()[0]["saved"]["alone"]


def test_buffers_are_broadcast_as_before() -> None:
    """Not in the forward after one without gradients, as `DistributedDataParallel` has it."""
    for found in ranks():
        assert found["broadcasts"] == 0


def test_what_it_does_not_take_is_refused() -> None:
    for found in ranks():
        said = found["refused"]
        assert "communication hook" in said["hooked"]
        assert "gradients from before" in said["graded"]
        assert "are one parameter" in said["tied"]
        assert "keeps parameters" in said["kept"]
        assert "ignores 0.0.bias" in said["ignoring"]
        assert "matches the blocks 'layers.*'" in said["unmatched"]


def test_it_is_offered_both_ways_and_rounds_where_gradients_are_clipped() -> None:
    for found in ranks():
        assert found["options"] == [
            [ROOT, ["reshard", True], "ROUNDING"],
            [ROOT, ["reshard", False], "ROUNDING"],
        ]
        assert found["unclipped"] == [None, None]


@pytest.mark.parametrize(
    ("name", "phase", "kind", "equivalence"),
    [
        ("aten::linalg_vector_norm", "optimizer", "parameter", "ROUNDING"),
        ("aten::mean", "optimizer", "optimizer_state", "ROUNDING"),
        ("aten::sum", "other", "gradient", "ROUNDING"),
        ("aten::sum", "forward", "parameter", None),
        ("aten::lerp_", "optimizer", "optimizer_state", None),
    ],
)
def test_an_optimizer_that_adds_up_what_is_sharded_rounds(
    name: str, phase: Phase, kind: Kind, equivalence: str | None
) -> None:
    step = Step()
    step.declare("DDP")
    step.replica(64)
    step.op(name, step.alive(kind, 64), makes=8, phase=phase)
    step.exchange(64, 0.1)
    found = TECHNIQUE.options(step_of(step.profile()))
    assert [one.equivalence for one in found] == [equivalence] * 2


@pytest.mark.parametrize("options", [{"reshard": 1}, {"blocks": True}, {"offload": True}])
def test_other_options_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ApplyFailed, match="shard has the options"):
        TECHNIQUE.apply({}, Technique(name="shard", where=(ROOT,), options=options))


def test_another_module_is_refused() -> None:
    with pytest.raises(ApplyFailed, match="is a Linear, but shard applies to"):
        TECHNIQUE.apply({"Net": torch.nn.Linear(2, 2)}, Technique(name="shard", where=("Net",)))
