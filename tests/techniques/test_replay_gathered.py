"""Replay of gathered rows, as of the edges of a graph: they are gathered again, bit for bit."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from steps import squared, train_step
from torchtrim import record
from torchtrim.records.plan import Technique
from torchtrim.step.from_profile import step_of
from torchtrim.step.simulate import simulate
from torchtrim.techniques.replay.technique import TECHNIQUE

Gather = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
GATHERS: dict[str, Gather] = {
    "index": lambda x, rows: x[rows],
    "index_select": lambda x, rows: x.index_select(0, rows),
    "gather": lambda x, rows: x.gather(0, rows[:, None].expand(-1, x.shape[1])),
    "embedding": lambda x, rows: F.embedding(rows, x),
}


class Edges(nn.Module):
    """Messages along edges of a graph, twice, scaled by a weight of each edge."""

    def __init__(self, gather: Gather) -> None:
        super().__init__()
        self.layer, self.gather = nn.Linear(32, 32), gather
        self.register_buffer("sources", torch.arange(2000) * 7 % 100)
        self.register_buffer("ends", torch.arange(2000) * 3 % 100)
        self.scales = nn.Parameter(torch.rand(2000, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.layer(x)
        for _ in range(2):
            messages = self.gather(hidden, self.sources) * self.scales
            hidden = torch.zeros_like(hidden).index_add(0, self.ends, messages)
        return hidden


def case(name: str) -> tuple[Edges, torch.Tensor]:
    torch.manual_seed(0)
    return Edges(GATHERS[name]), torch.randn(100, 32)


def trained(model: nn.Module, batch: torch.Tensor) -> list[torch.Tensor]:
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(3):
        squared(model, batch).backward()
        optimizer.step()
    return [p.detach() for p in model.parameters()]


@pytest.mark.parametrize("name", sorted(GATHERS))
def test_gathered_rows_are_gathered_again(name: str) -> None:
    step = step_of(record(train_step(*case(name), "SGD")))
    where = f"Edges:addmm.0,{name}.0"
    (option,) = (one for one in TECHNIQUE.options(step) if one.where == where)
    edit = TECHNIQUE.edits(step, option)
    assert edit is not None
    predicted = simulate(step, [edit]).peak_bytes
    assert predicted < simulate(step).peak_bytes
    technique = Technique(name="replay", where=(where,))
    planned, batch = case(name)
    TECHNIQUE.apply({"Edges": planned}, technique)
    assert simulate(step_of(record(train_step(planned, batch, "SGD")))).peak_bytes <= predicted
    del planned
    (planned, _), (twin, _) = case(name), case(name)
    TECHNIQUE.apply({"Edges": planned}, technique)
    assert all(map(torch.equal, trained(planned, batch), trained(twin, batch)))
