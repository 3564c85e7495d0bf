"""Gradients as views of buckets and fewer exchanges, on two processes over gloo."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

from techniques.replicas import ROOT, found_by
from torchtrim.errors import ApplyFailed
from torchtrim.executor.registry import technique
from torchtrim.records.plan import Technique
from torchtrim.techniques.data_parallel import TECHNIQUE

pytestmark = pytest.mark.slow  # The first of them starts the ranks.


@cache
def ranks() -> tuple[dict[str, Any], ...]:
    """What each rank found."""
    return found_by("techniques.replicas")


KINDS = (
    *("views", "accumulating views", "waiting views"),
    *("kept views", "static views", "searching views"),
)


@pytest.mark.parametrize("kind", KINDS)
def test_views_are_the_same_to_the_bit_and_are_taken_back(kind: str) -> None:
    for found in ranks():
        assert found[kind]["apart"] == 0
        assert found[kind]["reverted"] == 0
        assert found[kind]["own"]


def test_kept_gradients_are_in_the_buckets() -> None:
    """The gradients of eight parameters are in fewer storages."""
    for found in ranks():
        assert 0 < found["kept views"]["storages"] < 8


@pytest.mark.parametrize("kind", ["bucket_cap_mb", "static_graph"])
def test_other_buckets_and_one_search_are_the_same_to_the_bit_and_are_taken_back(kind: str) -> None:
    for found in ranks():
        seen = found[kind]
        assert seen["apart"] == seen["reverted"] == 0
        assert seen["exchanges"][1] < seen["exchanges"][0]
        assert seen["again"][0] == seen["again"][1] == seen["exchanges"][0]
        assert seen["same settings"]


def test_a_static_graph_needs_an_exchange_in_its_first_forward() -> None:
    for found in ranks():
        assert "first forward is inside no_sync()" in found["no_sync first"]
        always, accumulating = found["searches"]
        assert "static_graph" in always
        assert "static_graph" not in accumulating


def test_gradients_in_bfloat16_are_those_rounded_by_hand_and_are_taken_back() -> None:
    for found in ranks():
        seen = found["compressed"]
        assert seen["by hand"] == seen["reverted"] == 0
        assert 0 < seen["gradients"] < 2**-8
        assert "already sent in bfloat16" in seen["twice"]
        assert seen["offered"] == [ROOT]


def test_a_step_exchanges_once() -> None:
    for found in ranks():
        seen = found["accumulates"]
        assert seen["rounds"] == 3
        assert 0 < seen["apart"] < 1e-12
        assert seen["reverted"] == 0
        assert seen["hooks"] == 0


def test_a_step_of_fewer_micro_batches_is_refused_on_every_rank() -> None:
    for found in ranks():
        assert "parameters changed after 2 micro-batches" in found["accumulates"]["refused"]


def test_what_it_does_not_take_is_refused() -> None:
    for found in ranks():
        assert "communication hook" in found["hook"]
        assert "broadcasts buffers" in found["buffers"]


def test_views_are_planned_and_need_what_was_predicted() -> None:
    for found in ranks():
        seen = found["predicted"]
        assert "data_parallel" in seen["techniques"]
        assert seen["places"] == [[ROOT]]
        assert seen["after"] <= seen["before"] - seen["gradients"] // 2
        assert abs(seen["predicted"] - seen["after"]) <= 0.03 * seen["after"]


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("data_parallel", {"gradient_as_bucket_view": True}),
        ("compress_gradients", {"dtype": "bfloat16"}),
    ],
)
def test_another_module_is_refused(name: str, options: dict[str, Any]) -> None:
    plan = Technique(name=name, where=("Net",), options=options)
    with pytest.raises(ApplyFailed, match=f"is a Linear, but {name} applies"):
        technique(name).apply({"Net": torch.nn.Linear(2, 2)}, plan)


@pytest.mark.parametrize(
    "options",
    [{}, {"accumulate": 1}, {"bucket_cap_mb": 0}, {"static_graph": 1}, {"buckets": 2}],
)
def test_other_options_are_refused(options: dict[str, Any]) -> None:
    module = DistributedDataParallel.__new__(DistributedDataParallel)
    plan = Technique(name="data_parallel", where=("Net",), options=options)
    with pytest.raises(ApplyFailed, match="data_parallel takes one option"):
        TECHNIQUE.apply({"Net": module}, plan)
