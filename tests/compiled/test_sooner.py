"""Edits of joint graphs: backward frees memory sooner, and computes the same bits."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
import torch._dynamo
from tests.compiled.test_compiled import watched
from torch import fx, nn
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import make_boxed_func
from torch._inductor.utils import fresh_cache
from torch.fx.experimental.proxy_tensor import make_fx

from torchtrim.capture.allocator import CpuAllocator
from torchtrim.compiled.apply import Applied
from torchtrim.compiled.inductor import NotPlanned, Partitioner
from torchtrim.compiled.names import key_of, keys_of
from torchtrim.compiled.planning import GraphPlanner
from torchtrim.compiled.sooner import free_sooner
from torchtrim.records.plan import CompiledGraph

BACKWARD = torch.ops.aten.convolution_backward.default
KINDS = (
    {"kernel_size": 3, "padding": 1},
    {"kernel_size": 3, "stride": 2},
    {"kernel_size": 3, "stride": 2, "padding": 1, "bias": False},
    {"kernel_size": (1, 3), "stride": (3, 1), "dilation": (1, 2)},
    {"kernel_size": 5, "padding": 2, "groups": 8},
    {"kernel_size": 1},
    {"kernel_size": 3, "stride": 2, "output_padding": 1, "transposed": True},
    {"kernel_size": 3, "padding": 1, "groups": 4, "transposed": True},
)


@pytest.fixture(autouse=True)
def _forget() -> None:
    torch._dynamo.reset()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_gradients_of_a_convolution_are_the_same_apart(kind: dict[str, Any], dtype: Any) -> None:
    rest = {name: value for name, value in kind.items() if name != "transposed"}
    layer = (nn.ConvTranspose2d if kind.get("transposed") else nn.Conv2d)(8, 16, **rest).to(dtype)
    x = torch.randn(2, 8, 12, 12, dtype=dtype)
    graph = _gradients(layer, x)
    given = torch.randn_like(layer(x)), x, layer.weight.detach()
    together = graph(*given)
    free_sooner(graph)
    assert sum(node.target is BACKWARD for node in graph.graph.nodes) <= (
        2 if rest["kernel_size"] == 1 else 1
    )
    for one, other in zip(together, graph(*given), strict=True):
        assert one is other is None or torch.equal(one, other)


def _gradients(layer: Any, x: torch.Tensor) -> fx.GraphModule:
    sizes = [16] if layer.bias is not None else None
    settings = layer.stride, layer.padding, layer.dilation, layer.transposed, layer.output_padding

    def gradients(tangents: torch.Tensor, x: torch.Tensor, weight: torch.Tensor) -> Any:
        mask = [True, True, sizes is not None]
        return BACKWARD(tangents, x, weight, sizes, *settings, layer.groups, mask)

    return make_fx(gradients)(torch.randn_like(layer(x)), x, layer.weight.detach())


class Joined(nn.Module):
    """A small U-Net: two convolutions read what comes up, joined to what was kept."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.down = nn.Conv2d(3, 8, 3, 1, 1), nn.Conv2d(8, 16, 3, 2, 1)
        self.both, self.past = nn.Conv2d(24, 8, 3, 1, 1), nn.Conv2d(24, 8, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        kept = self.first(x).relu()
        up = nn.functional.interpolate(self.down(kept).relu(), scale_factor=2.0)
        x = torch.cat((up, kept), 1)
        return (self.both(x).relu() + self.past(x)).square().mean()


@functools.cache
def joined() -> GraphPlanner:
    torch.manual_seed(0)
    return GraphPlanner(watched(Joined(), _pixels()))


def _pixels() -> torch.Tensor:
    return torch.randn(4, 3, 32, 32)


@pytest.mark.slow
def test_a_convolution_frees_what_it_reads_before_the_gradient_of_its_input() -> None:
    planner = joined()
    choice = planner.plan(planner.own.peak_bytes - 1)
    assert choice is not None
    assert choice.added_seconds == 0
    assert choice.simulated.peak_bytes < 0.9 * planner.own.peak_bytes


@pytest.mark.slow
def test_a_graph_stays_as_it_is_if_a_plan_of_it_fits() -> None:
    layers = [nn.Conv2d(3, 8, 3, 1, 1), nn.GELU()]
    for _ in range(3):
        layers += [nn.Conv2d(8, 8, 3, 1, 1), nn.GELU()]
    torch.manual_seed(0)
    graphs = watched(nn.Sequential(*layers, Mean()), _pixels())
    planner = GraphPlanner(graphs)
    choice = planner.plan(int(0.7 * planner.own.peak_bytes))
    assert choice is not None
    assert [one.graph for one in choice.graphs] == [joint.key for joint in graphs.joints]
    assert graphs.edited[0].key != graphs.joints[0].key


class Mean(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.square().mean()


def test_a_graph_that_no_plan_knows_is_said_once_and_left_to_torch() -> None:
    keys: list[str] = []
    said: list[Exception] = []

    def choose(graph: fx.Graph, *_: Any) -> list[fx.Node]:
        keys.append(key_of(keys_of(graph)))
        raise NotPlanned

    backend = aot_autograd(
        fw_compiler=lambda graph, _: make_boxed_func(graph.forward),
        partition_fn=Partitioner(choose, "test", said.append),
    )
    model = Joined()
    torch.compile(model, backend=backend)(_pixels()).backward()
    assert model.first.weight.grad is not None
    assert len(keys) == len({*keys}) == 2  # as it is, and edited
    assert [*map(type, said)] == [NotPlanned]


@pytest.mark.slow
def test_a_plan_of_convolutions_has_the_simulated_peak_and_the_same_gradients() -> None:
    planner = joined()
    choice = planner.plan(planner.own.peak_bytes - 1)
    assert choice is not None
    own, planned = _run(()), _run(choice.graphs)
    for simulated, (peak, _) in ((planner.own, own), (choice.simulated, planned)):
        assert simulated.peak_bytes == pytest.approx(peak, rel=0.01)
    for one, other in zip(own[1], planned[1], strict=True):
        torch.testing.assert_close(one, other)


def _run(plan: tuple[CompiledGraph, ...]) -> tuple[int, list[Any]]:
    torch._dynamo.reset()
    torch.manual_seed(0)
    model, x = Joined(), _pixels()
    applied = Applied(plan)
    with fresh_cache(), applied.installed():  # cached code of a plan asks it nothing
        compiled = torch.compile(model)
        for _ in range(3):
            model.zero_grad()
            watch = CpuAllocator()
            watch.start()
            compiled(x).backward()
            peak = watch.stop().peak
    assert not applied.failures
    assert not applied.unused
    return peak, [parameter.grad for parameter in model.parameters()]
