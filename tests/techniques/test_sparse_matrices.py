"""Networks on graphs, whose sparse matrices have no storage of their own, are planned as others are."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import torchtrim
from torchtrim.capture.snapshot import Snapshot
from torchtrim.step.from_profile import step_of
from torchtrim.techniques.micro_batch.technique import TECHNIQUE as MICRO_BATCH
from travelling import Traveller, on, planned, run

pytestmark = pytest.mark.filterwarnings("ignore:Sparse CSR tensor support")
NODES, WIDTH = 200, 32
LAYOUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "coo": lambda dense: dense.to_sparse_coo().coalesce(),
    "csr": torch.Tensor.to_sparse_csr,
    "csc": torch.Tensor.to_sparse_csc,
}


class Graph(nn.Module):
    """Layers that add up neighbours, with batch norm and dropout. The matrix is an attribute."""

    def __init__(self, layout: str) -> None:
        super().__init__()
        self.linears = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.norms = nn.ModuleList(nn.BatchNorm1d(WIDTH) for _ in range(3))
        self.edges = LAYOUTS[layout]((torch.rand(NODES, NODES) < 0.05).float())

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Graph:
        self.edges = fn(self.edges)
        super()._apply(fn, recurse)
        return self

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for linear, norm in zip(self.linears, self.norms, strict=True):
            x = F.dropout(F.relu(norm(self.edges @ linear(x))), 0.5, self.training)
        return x


def graph(layout: str) -> Callable[[], Traveller]:
    return lambda: Traveller(Graph(layout), torch.randn(NODES, WIDTH))


@pytest.mark.parametrize("device", ["cpu", "a100"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_smallest_plan_computes_the_same_bits(layout: str, device: str) -> None:
    plan = planned(device, graph(layout))
    assert {one.name for one in plan.techniques} & {"replay", "offload_activations"}
    assert run(device, graph(layout), plan).digest == run(device, graph(layout)).digest


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_snapshot_brings_a_sparse_matrix_back(layout: str) -> None:
    model = Graph(layout)
    before = model.edges.to_dense()
    snapshot = Snapshot([model], [])
    model.edges.values().mul_(2)
    snapshot.restore()
    assert torch.equal(model.edges.to_dense(), before)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_nodes_are_no_batch(layout: str) -> None:
    with on("cpu", graph(layout)) as work:
        work.model.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(3))
        step = step_of(torchtrim.record(work))
    assert not [one for one in MICRO_BATCH.options(step) if one.where == "Graph"]
