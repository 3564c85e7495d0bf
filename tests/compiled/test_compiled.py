"""Compiled graphs: their memory simulated from Inductor's code, and plans for what they save."""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch._dynamo
from torch import fx, nn
from torch.utils.checkpoint import checkpoint

from torchtrim.capture.allocator import CpuAllocator
from torchtrim.compiled import inductor
from torchtrim.compiled.apply import Applied
from torchtrim.compiled.graphs import Graphs
from torchtrim.compiled.inductor import Partitioner, draws, probe_compiled
from torchtrim.compiled.phases import PhaseMarks
from torchtrim.compiled.planning import GraphPlanner
from torchtrim.records.plan import CompiledGraph

ROWS, WIDTH = 256, 32


@pytest.fixture(autouse=True)
def _forget() -> None:
    torch._dynamo.reset()


class Mlp(nn.Module):
    """Residual layers with dropout, a norm each."""

    def __init__(self, layers: int = 3, p: float = 0.2) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(layers))
        self.grow = nn.ModuleList(nn.Linear(WIDTH, 4 * WIDTH) for _ in range(layers))
        self.shrink = nn.ModuleList(nn.Linear(4 * WIDTH, WIDTH) for _ in range(layers))
        self.drop = nn.Dropout(p)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for norm, grow, shrink in zip(self.norms, self.grow, self.shrink, strict=True):
            x = x + self.drop(shrink(nn.functional.gelu(grow(norm(x)))))
        return x.square().mean()


class Broken(nn.Module):
    """Two graphs."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x).sigmoid()
        torch._dynamo.graph_break()
        return self.second(x).sigmoid().sum()


def watched(model: nn.Module, *batch: torch.Tensor, **options: Any) -> Graphs:
    torch._dynamo.reset()
    graphs = Graphs()
    with graphs.watched():
        compiled = torch.compile(model, **options)
        for _ in range(2):
            graphs.begin()
            compiled(*batch).backward()
    return graphs


@functools.cache
def mlp() -> GraphPlanner:
    torch.manual_seed(0)
    return GraphPlanner(watched(Mlp(), torch.randn(ROWS, WIDTH)))


def test_the_private_interfaces_work() -> None:
    assert probe_compiled().startswith("works")


def test_saved_bytes_are_those_of_the_saved_tensors() -> None:
    graphs = watched(nn.Sequential(nn.Linear(8, 16), nn.Sigmoid(), _Sum()), torch.randn(64, 8))
    # sigmoid's result alone; the input and the weights are the program's, and the loss is a number.
    assert graphs.memory().saved_bytes == 64 * 16 * 4 + 4


class _Sum(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.sum()


@pytest.mark.slow
def test_a_plan_needs_less_and_names_what_it_saves() -> None:
    planner = mlp()
    choice = planner.plan(int(0.75 * planner.own.peak_bytes))
    assert choice is not None
    assert choice.simulated.peak_bytes <= 0.75 * planner.own.peak_bytes
    (graph,) = choice.graphs
    assert len(graph.saves) == len(set(graph.saves)) > 0


@pytest.mark.parametrize("dropped", [0.0, 0.1])
def test_attention_draws_if_it_drops(dropped: float) -> None:
    graph = fx.Graph()
    query = graph.placeholder("query")
    attend = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
    assert draws(graph.call_function(attend, (query, query, query, dropped))) == (dropped > 0)
    assert not draws(graph.call_function(attend, (query, query, query)))
    assert draws(graph.call_function(torch.ops.aten.native_dropout.default, (query, 0.0, True)))


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_what_draws_random_numbers_is_never_computed_again() -> None:
    with pytest.raises(ValueError, match="backward draws"):
        _compile_saving(lambda graph, info: [*info.inputs])


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_a_choice_that_fails_leaves_torchs_own_and_says_so() -> None:
    said: list[str] = []
    directions = _compile_saving(lambda graph, info: [*info.inputs], lambda e: said.append(str(e)))
    assert directions == [False, True]
    assert "backward draws" in said[0]


def _compile_saving(
    choose: Callable[[fx.Graph, Any], list[fx.Node]],
    failed: Callable[[Exception], None] | None = None,
) -> list[bool]:
    """Partition a model with dropout by a choice, and return for each graph whether it is a backward."""
    found: list[bool] = []
    partitioner = Partitioner(lambda graph, info, own: choose(graph, info), "test", failed)

    def partition(joint: fx.GraphModule, inputs: Any, **options: Any) -> Any:
        both = partitioner(joint, inputs, **options)
        found.extend((False, True) if not any(map(draws, both[1].graph.nodes)) else ())
        return both

    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch.aot_autograd import make_boxed_func

    backend = aot_autograd(
        fw_compiler=lambda graph, _: make_boxed_func(graph.forward), partition_fn=partition
    )
    try:
        torch.compile(Mlp(1), backend=backend)(torch.randn(8, WIDTH)).backward()
    except torch._dynamo.exc.BackendCompilerFailed as error:
        raise error.inner_exception from None
    return found


def test_names_hold_for_the_same_program_alone() -> None:
    keys = [
        watched(Mlp(1, p), torch.randn(rows, WIDTH)).joints[0].key
        for p, rows in ((0.0, 16), (0.0, 16), (0.0, 24))
    ]
    assert keys[0] == keys[1] != keys[2]


@pytest.mark.filterwarnings("ignore:The .grad attribute")
def test_graphs_of_a_broken_function_are_simulated_in_order() -> None:
    graphs = watched(Broken(), torch.randn(ROWS, WIDTH))
    assert len(graphs.joints) == 2
    # both sigmoids, the first of which the second graph takes and saves, and the loss
    assert graphs.memory().saved_bytes == 4 * ROWS * 5 * WIDTH + 4


def test_symbolic_sizes_are_those_of_the_largest_call() -> None:
    model, graphs = nn.Sequential(nn.Linear(8, 16), nn.Sigmoid(), _Sum()), Graphs()
    with graphs.watched():
        compiled = torch.compile(model, dynamic=True)
        for rows in (64, 96, 32):
            graphs.begin()
            compiled(torch.randn(rows, 8)).backward()
    assert len(graphs.graphs) == 1
    assert graphs.memory().saved_bytes == 96 * 16 * 4 + 4


def test_numbers_of_modules_may_be_symbols_too() -> None:
    model, graphs = nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), _Sum()), Graphs()
    with graphs.watched():
        graphs.begin()
        torch.compile(model, dynamic=True, fullgraph=True)(torch.randn(64, 8)).backward()
    assert len(graphs.joints) == 1
    assert graphs.memory().saved_bytes > 64 * 16 * 4


class Shifted(nn.Module):
    """A softmax, whose loops Inductor fuses at their outer level, of a sum with its shift."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.layer(x).view(16, 16, WIDTH)
        return (x + x.roll((3, 3), (0, 1))).softmax(-1).square().mean()


def test_without_vectors_the_code_allocates_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(ROWS, WIDTH)
    quick = [*_sources(watched(Shifted(), x))]
    monkeypatch.setattr(inductor, "no_vectors", contextlib.nullcontext)
    slow = [*_sources(watched(Shifted(), x))]
    vectors = [sum(map(len, re.findall("at::vec", source))) for source in (*quick, *slow)]
    assert sum(vectors[:2]) < sum(vectors[2:])
    assert [*map(_lines, quick)] == [*map(_lines, slow)]


def _sources(graphs: Graphs) -> Iterator[str]:
    for call in graphs.calls():
        assert call.pair.backward is not None
        yield from (call.pair.forward.source, call.pair.backward.source)


def _lines(source: str) -> str:
    """The lines that allocate, call and free; the names of kernels tell kernels of a name apart by number."""
    call = source[source.index("def call") : source.index("runner = ")]
    return re.sub(r"cpp_fused_\w+", "kernel", call)


def test_two_plans_never_share_cached_code() -> None:
    plans = [(), (CompiledGraph(graph="a", saves=("b",)),)]
    keys = []
    for plan in plans:
        with Applied(plan).installed():
            keys.append(torch._inductor.config.custom_partitioner_fn.uuid())
    assert len({*keys}) == 2
    assert torch._inductor.config.custom_partitioner_fn is None


@pytest.mark.slow
def test_a_compiled_plan_has_the_simulated_peak_and_the_same_gradients() -> None:
    planner = mlp()
    choice = planner.plan(int(0.75 * planner.own.peak_bytes))
    assert choice is not None
    own, planned = _run(()), _run(choice.graphs)
    for simulated, (peak, _) in ((planner.own, own), (choice.simulated, planned)):
        assert simulated.peak_bytes == pytest.approx(peak, rel=0.01)
    assert planned[0] < 0.78 * own[0]
    for one, other in zip(own[1], planned[1], strict=True):
        torch.testing.assert_close(one, other)


def _run(plan: tuple[CompiledGraph, ...]) -> tuple[int, list[torch.Tensor]]:
    torch._dynamo.reset()
    torch.manual_seed(0)
    model, x = Mlp(), torch.randn(ROWS, WIDTH)
    applied = Applied(plan)
    with applied.installed():
        compiled = torch.compile(model)
        for _ in range(3):
            model.zero_grad()
            torch.manual_seed(1)
            watch = CpuAllocator()
            watch.start()
            compiled(x).backward()
            peak = watch.stop().peak
    assert not applied.failures
    return peak, [parameter.grad for parameter in model.parameters()]


def test_a_gradient_lives_until_the_last_loop_that_reads_it() -> None:
    layers = nn.Linear(WIDTH, 4 * WIDTH), nn.BatchNorm1d(4 * WIDTH), nn.ReLU()
    graphs = watched(
        nn.Sequential(*layers, nn.Linear(4 * WIDTH, 8), _Sum()), torch.randn(ROWS, WIDTH)
    )
    (joint,) = graphs.joints
    size = 4 * ROWS * 4 * WIDTH
    begin = next(at for at, level in enumerate(joint.gradients) if level >= size)
    _, end = joint.kernels[
        -1
    ]  # of the first layer's weight: a norm's gradient takes two loops before
    assert begin < end - 4
    assert min(joint.gradients[begin:end]) >= size


def test_micro_batches_are_simulated_in_the_order_in_which_they_run() -> None:
    model, x, graphs = Mlp(1), torch.randn(ROWS, WIDTH), Graphs()
    with graphs.watched():
        compiled = torch.compile(model)
        for _ in range(2):
            graphs.begin()
            for part in x.chunk(2):
                compiled(part).backward()
    assert [name for name in graphs.memory().phases if "after" not in name] == [
        "forward 0",
        "backward 0",
        "forward 1",
        "backward 1",
        "update",
    ]
    gradients = 4 * sum(each.numel() for each in model.parameters())
    torch._dynamo.reset()
    alone = watched(model, x.chunk(2)[0]).memory()
    assert graphs.memory().saved_bytes == alone.saved_bytes + gradients


def test_what_was_measured_in_a_phase_and_not_simulated_is_added_to_that_phase_alone() -> None:
    graphs = watched(Mlp(1), torch.randn(ROWS, WIDTH))
    own = graphs.memory()
    measured = {**own.phases, "after forward 0": own.peak_bytes + 1000}
    planner = GraphPlanner(graphs, measured)
    assert planner.own.peak_bytes == own.peak_bytes + 1000
    assert planner.own.backward_peak == own.backward_peak
    assert GraphPlanner(graphs, {"forward 7": 5}).own.phases == own.phases


@pytest.mark.slow
def test_each_phase_of_compiled_code_is_measured_as_it_was_simulated() -> None:
    torch.manual_seed(0)
    model, x = Mlp(1), torch.randn(ROWS, WIDTH)
    simulated = watched(model, x).memory().phases
    torch._dynamo.reset()
    marks = PhaseMarks()
    with inductor.noted(lambda *_: None, marks.marked):
        compiled = torch.compile(model)
        for _ in range(2):
            marks.begin()
            model.zero_grad()
            watch = CpuAllocator()  # a new one: it has not seen those gradients
            watch.start()
            compiled(x).backward()
            phases = watch.stop().phases
    assert {*phases} == {*simulated} - {"update"}
    assert all(phases[name] == pytest.approx(simulated[name], rel=0.01) for name in phases)


class Checkpointed(nn.Module):
    """Attention in a checkpoint: its operator could draw, so backward is given forward's generator states."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.view(4, 4, -1, WIDTH)
        attend = nn.functional.scaled_dot_product_attention
        return checkpoint(attend, x, x, x, use_reentrant=False).square().sum()


def test_a_checkpoint_of_what_could_draw_is_simulated() -> None:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), Checkpointed())
    graphs = watched(model, torch.randn(ROWS, WIDTH))
    assert graphs.memory().saved_bytes >= 4 * ROWS * WIDTH


class Translator(nn.Module):
    """A text and its translation, whose words have one table, or one each."""

    def __init__(self, *, tied: bool) -> None:
        super().__init__()
        self.words = nn.Embedding(16, WIDTH)
        self.others = self.words if tied else nn.Embedding(16, WIDTH)
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))

    def forward(self, text: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        x, y = self.words(text), self.others(other)
        x = self.layers[0](self.norms[0](x)).sigmoid()
        return self.layers[1](self.norms[1](x + y)).square().mean()


@pytest.mark.parametrize("tied", [True, False])
def test_what_is_looked_up_in_one_table_may_be_one_kernel(*, tied: bool) -> None:
    (joint,) = watched(Translator(tied=tied), *torch.randint(0, 16, (2, ROWS))).joints
    sizes = [joint.values[number].bytes for number in joint.together]
    assert sizes.count(4 * ROWS * WIDTH) == (2 if tied else 0)
