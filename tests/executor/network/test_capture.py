"""What of a network is captured, what is refused and why, and that nothing of the user's is touched."""

import random

import pytest
import torch
from torch import Tensor, nn

import torchtrim
from torchtrim.executor.network.capture import capture


class Views(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        flat = x.view(-1)
        return flat[1:], (x + 1).t()


def test_views_share_the_memory_of_what_they_view() -> None:
    captured = capture(Views(), (torch.ones(2, 3),), {})
    first, second = (captured.values[ref.value] for ref in captured.results)
    assert (first.memory, first.ours, first.offset) == (captured.values[0].memory, False, 1)
    assert second.ours
    assert second.strides == (1, 3)


def test_modules_and_parameters_are_named() -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3)).eval()
    captured = capture(model, (torch.ones(4, 2),), {})
    assert [op.module for op in captured.ops] == ["0", "1"]
    keys = {(source.kind, source.key) for source in captured.sources}
    assert {("parameter", "0.weight"), ("buffer", "1.running_mean"), ("input", 0)} <= keys


class OnValues(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x if x.sum() > 0 else -x


class OnShapes(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x[x > 0].sqrt()


class ByChance(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * random.random()


class Remembers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append(x)
        return x + len(self.seen)


@pytest.mark.parametrize(
    ("model", "why"),
    [
        (OnValues(), "torch.export cannot follow"),
        (OnShapes(), "torch.export cannot follow|a shape in it depends on values"),
        (ByChance(), "random numbers"),
        (Remembers(), "changes its own attributes"),
        (nn.TransformerEncoderLayer(8, 2, 8, batch_first=True).eval(), "fused path"),
    ],
)
def test_what_has_no_graph_is_refused_in_a_line(model: nn.Module, why: str) -> None:
    before = random.getstate(), torch.get_rng_state()
    with pytest.raises(torchtrim.Unsupported, match=why) as caught:
        capture(model, (torch.ones(2, 4, 8),), {})
    assert "\n" not in str(caught.value)
    assert random.getstate() == before[0]
    assert torch.equal(torch.get_rng_state(), before[1])


def test_the_model_is_as_it_was() -> None:
    model = Remembers()
    with pytest.raises(torchtrim.Unsupported):
        capture(model, (torch.ones(2),), {})
    assert model.seen == []
    assert not model._forward_hooks


def test_sparse_inputs_are_refused() -> None:
    with pytest.raises(torchtrim.Unsupported, match="not dense"):
        capture(nn.Linear(2, 2), (torch.eye(2).to_sparse(),), {})
