"""What a person would do by hand: blocks are found by their numbers, and bytes are those measured."""

from __future__ import annotations

from collections import OrderedDict

import pytest
import torch
from bench.by_hand import HALVES, Trained, peak, ways_of
from tests.cases import zoo
from torch import Tensor, nn

from steps import fitting
from torchtrim.executor.registry import Option
from torchtrim.planner.by_hand import by_hand, checkpointed
from torchtrim.step.from_profile import step_of
from torchtrim.step.simulate import simulate
from torchtrim.step.step import Span


def options(*where: str, tasks: int = 4) -> list[Option]:
    return [Option("recompute", one, (Span(0, tasks),)) for one in where]


def test_the_largest_family_of_blocks_is_taken_in_order_of_its_numbers() -> None:
    small = options("Net.stem.0", "Net.stem.1", tasks=2)
    blocks = options("Net.blocks.10", "Net.blocks.2", "Net.blocks.1", "Net.blocks[1:3]", "Net.head")
    found = {
        name: [one.where for one in chosen] for name, chosen in checkpointed(small + blocks).items()
    }
    assert found == {
        "each block checkpointed": ["Net.blocks.1", "Net.blocks.2", "Net.blocks.10"],
        "every second block checkpointed": ["Net.blocks.1", "Net.blocks.10"],
    }


def test_a_model_without_blocks_in_a_row_has_none() -> None:
    assert checkpointed(options("Net.a", "Net.b.0")) == {}


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.inner, self.outer = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.outer(nn.functional.gelu(self.inner(self.norm(x)))).sin()


def blocks() -> zoo.Sample:
    """A model of four blocks."""
    model = nn.Sequential(OrderedDict(blocks=nn.Sequential(*(Block(32) for _ in range(4)))))
    return zoo.Sample(model, (torch.randn(64, 32), torch.randint(32, (64,))), zoo.classified)


def test_what_is_simulated_is_what_a_person_measures() -> None:
    """With torch's own checkpointing, but for a few scalars; the halves within two hundredths."""
    original = fitting(Trained.of(blocks).work).observe()
    step = step_of(original.profile, original.seconds)
    simulated = {way.name: simulate(step, way.edits).peak_bytes for way in by_hand(step)}
    other = Trained.of(blocks)
    base = peak(other.step) - simulate(step).peak_bytes
    for way, (context, run) in ways_of(other, original.profile).items():
        with context:
            measured = peak(run) - base
        least = 0.02 * measured if way == HALVES else 256
        assert simulated[NAMES[way]] == pytest.approx(measured, abs=least)


NAMES = {
    "each block": "each block checkpointed",
    "every second block": "every second block checkpointed",
    "each block, products kept": "each block, its products kept",
    HALVES: HALVES,
}
