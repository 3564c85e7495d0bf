"""Where recorded models may be cut, and what their segments cost."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import Tensor, nn

import torchtrim
from pipelines.models import Gpt, batch, loss_of
from steps import ConvNet, squared, trial
from torchtrim import TrainStep
from torchtrim.errors import Unsupported
from torchtrim.planner.stages.calls import passes_in
from torchtrim.planner.stages.chain import ChainReader
from torchtrim.planner.stages.timing import stages_of
from torchtrim.records.profile import Profile


@functools.cache
def reader_of(kind: str) -> ChainReader:
    torch.manual_seed(0)
    profile = profile_of(kind)
    return ChainReader(profile, profile.step_seconds)


def profile_of(kind: str) -> Profile:
    if kind in ("conv", "frozen"):
        model: nn.Module = ConvNet().train(kind == "conv")
        given = torch.randn(4, 3, 8, 8)
        return trial(TrainStep(model, squared, torch.optim.SGD(model.parameters(), 0.1), given))[1]
    model = (
        Tied() if kind == "tied" else Skips() if kind == "skips" else Gpt(masked=kind == "masked")
    )
    optimizer = torch.optim.AdamW(model.parameters())
    step = TrainStep(model, lambda net, both: loss_of(net(both[0]), both[1]), optimizer, batch())
    return trial(step)[1]


class Tied(nn.Module):
    """The head has the embedding's weights."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Embedding(32, 16)
        self.a, self.b = nn.Linear(16, 16), nn.Linear(16, 16)
        self.head = nn.Linear(16, 32, bias=False)
        self.head.weight = self.token.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.b(self.a(self.token(tokens))))


class Skips(nn.Module):
    """What the embedding gives is added before the head."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Embedding(32, 16)
        self.a, self.b = nn.Linear(16, 16), nn.Linear(16, 16)
        self.head = nn.Linear(16, 32)

    def forward(self, tokens: Tensor) -> Tensor:
        first = self.token(tokens)
        return self.head(self.b(self.a(first)) + first)


@pytest.mark.parametrize("kind", ["gpt", "masked"])
def test_a_model_is_cut_between_blocks_and_not_inside_of_residuals(kind: str) -> None:
    """What is computed from inputs alone, such as a mask, crosses no cut: each stage makes its own."""
    places = [one.where for one in reader_of(kind).chain(1.0).segments]
    assert places == [
        "",
        *(f"transformer.h.{number}" for number in range(4)),
        "transformer.ln_f",
        "lm_head",
    ]


def test_segments_add_up_to_the_step() -> None:
    reader = reader_of("gpt")
    segments = reader.chain(1.0).segments
    profile = profile_of("gpt")
    owned = [s.bytes for s in profile.storages if s.kind == "parameter"]
    states = [s.bytes for s in profile.storages if s.kind == "optimizer_state"]
    assert sum(one.gradients for one in segments) == sum(owned)
    assert sum(one.state for one in segments) == sum(owned) + sum(states)
    assert reader.batch == 8
    blocks = segments[1:5]
    assert len({one.held for one in blocks}) == 1
    half = reader.chain(0.5).segments[2]
    assert half.held == blocks[1].held // 2
    assert half.given == blocks[1].given // 2 == 8 * 8 * 16 * 4 // 2
    assert half.gradients == blocks[1].gradients


def test_weights_used_twice_keep_what_is_between_together() -> None:
    reader = reader_of("tied")
    assert len(reader.chain(1.0).segments) == 1
    assert any("tied weights" in reason for reason in reader.reasons)


def test_nothing_is_cut_under_a_skip_connection() -> None:
    reader = reader_of("skips")
    assert [one.where for one in reader.chain(1.0).segments] == ["", "head"]
    assert any("skip connection" in reason or "again" in reason for reason in reader.reasons)


def test_statistics_of_a_batch_are_refused() -> None:
    with pytest.raises(Unsupported, match="GroupNorm"):
        reader_of("conv")


def test_frozen_statistics_are_not() -> None:
    assert len(reader_of("frozen").chain(1.0).segments) > 3


def test_a_step_without_backward_is_refused() -> None:
    profile = Profile(
        torchtrim="0",
        torch="0",
        device="cpu",
        script="",
        project="",
        step_seconds=1.0,
        peak_bytes=0,
        tracked_peak_bytes=0,
        reserved_bytes=None,
        rss_bytes=None,
        operators=[],
        storages=[],
        modules=[],
        calls=[],
        places=[],
        labels=[],
        waits=[],
    )
    with pytest.raises(Unsupported, match="nothing to cut"):
        ChainReader(profile, 1.0)


def test_the_loss_belongs_to_the_last_segment() -> None:
    last = reader_of("gpt").chain(1.0).segments[-1]
    assert last.held >= 8 * 8 * 32 * 4


def test_a_step_that_accumulates_runs_its_model_more_than_once() -> None:
    model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.GELU()) for _ in range(4)))

    def twice(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        model(batch).square().mean().backward()
        loss: torch.Tensor = model(batch).abs().mean()
        return loss

    for loss, passes in ((squared, 1), (twice, 2)):
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        profile = torchtrim.record(TrainStep(model, loss, optimizer, torch.randn(16, 8)))
        assert passes_in(profile, "Sequential") == passes


def test_what_the_model_returns_is_kept_by_the_last_stage_where_autograd_does_not() -> None:
    """The loss keeps log-softmax of the scores and not the scores, of which a schedule has hold."""
    chain = reader_of("gpt").chain(0.5)
    scores = batch()[0].numel() // 2 * 32 * 4
    assert chain.segments[-1].sent == scores
    stages = stages_of(chain, (len(chain.segments) - 1,))
    assert stages[-1].held == chain.segments[-1].held + scores
    assert stages[-1].back == chain.segments[-1].back + scores
