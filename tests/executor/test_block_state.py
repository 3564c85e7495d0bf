"""A block that runs twice finds what it found first, and what it writes it writes once."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from torchtrim.errors import ApplyFailed
from torchtrim.executor import notices
from torchtrim.executor.block_state import BlockState
from torchtrim.records.plan import Technique
from torchtrim.techniques.micro_batch.technique import TECHNIQUE as MICRO_BATCH
from torchtrim.techniques.recompute.technique import TECHNIQUE as RECOMPUTE

WIDTH = 6
LATE = 2
now = {"step": 0}


@pytest.fixture(autouse=True)
def _said_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """What one test was told once, another is told too."""
    monkeypatch.setattr(notices, "_SAID", set())


class Block(nn.Module):
    """A layer with every kind of state; `late` is what it begins to do after its first calls."""

    def __init__(self, late: Callable[[Any, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.register_buffer("var", torch.ones(WIDTH))
        both = torch.zeros(2, WIDTH)
        self.register_buffer("upper", both[0])
        self.register_buffer("lower", both[1])
        self.average, self.count, self.shift = torch.zeros(WIDTH), 0, 0.0
        self.torch_generator = torch.Generator().manual_seed(3)
        self.generator, self.numpy_generator = random.Random(3), numpy.random.default_rng(3)
        self.late = [late]

    def __deepcopy__(self, memo: Any) -> Block:
        twin = Block(self.late[0])
        twin.load_state_dict(self.state_dict())
        return twin

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if now["step"] >= LATE:
            x = self.late[0](self, x)
        return torch.tanh(self.linear(x))


def of(x: torch.Tensor) -> torch.Tensor:
    return x.detach().mean(0)


def written(name: str, write: Callable[[torch.Tensor, torch.Tensor], Any]) -> Any:
    """Write to a tensor in place, and read it."""

    def late(block: Any, x: torch.Tensor) -> torch.Tensor:
        write(getattr(block, name), of(x))
        return x - getattr(block, name)

    return late


def rebound(block: Any, x: torch.Tensor) -> torch.Tensor:
    block.mean = 0.9 * block.mean + of(x)
    return x - block.mean


def in_kernels(block: Any, x: torch.Tensor) -> torch.Tensor:
    F.batch_norm(x.detach(), block.mean, block.var, training=True)
    return x - block.mean


def shared(block: Any, x: torch.Tensor) -> torch.Tensor:
    block.upper.add_(1)
    return x - block.upper - block.lower


def registered(block: Any, x: torch.Tensor) -> torch.Tensor:
    if not hasattr(block, "new"):
        block.register_buffer("new", torch.zeros(()))
    block.new += 1
    return x + block.new


def counted(block: Any, x: torch.Tensor) -> torch.Tensor:
    block.count += 1
    block.shift = block.shift + 0.5
    return x * block.count + block.shift


def kept(block: Any, x: torch.Tensor) -> torch.Tensor:
    block.average = block.average + of(x)
    return x - block.average


def drawn(block: Any, x: torch.Tensor) -> torch.Tensor:
    noise = torch.randn(x.shape, generator=block.torch_generator)
    return x * block.generator.random() + noise * float(block.numpy_generator.random())


def drawn_of_all(block: Any, x: torch.Tensor) -> torch.Tensor:
    return x * random.random() + float(numpy.random.rand()) * torch.rand(x.shape)


LATER: dict[str, Callable[[Any, torch.Tensor], torch.Tensor]] = {
    "in place": written("mean", lambda mean, new: mean.lerp_(new, 0.1)),
    "through data": written("mean", lambda mean, new: mean.data.add_(new)),
    "through a view": written("mean", lambda mean, new: mean.view(2, 3)[0].add_(1)),
    "through numpy": written("mean", lambda mean, new: numpy.add(mean.numpy(), 1, mean.numpy())),
    "a tensor attribute": written("average", lambda average, new: average.add_(new)),
    "by a kernel": in_kernels,
    "rebound": rebound,
    "two of one memory": shared,
    "registered late": registered,
    "plain attributes": counted,
    "a rebound tensor": kept,
    "its own generators": drawn,
    "the generators of all": drawn_of_all,
}


def run(model: nn.Module, between: Callable[[nn.Module], Any] = lambda _: None) -> list[Any]:
    """All that five steps leave."""
    torch.manual_seed(1)
    random.seed(1)
    numpy.random.seed(1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    left: list[Any] = []
    for step in range(5):
        now["step"] = step
        loss = model(torch.randn(8, WIDTH)).square().sum()
        between(model)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        left.append(loss.item())
    left += [value.tolist() for value in model.state_dict().values()]
    left += [
        (b.count, b.shift, b.average.tolist()) for b in model.modules() if isinstance(b, Block)
    ]
    drawn = [
        b.torch_generator.get_state().tolist() for b in model.modules() if isinstance(b, Block)
    ]
    return [*left, *drawn, random.random(), float(numpy.random.rand()), torch.rand(()).item()]


def pair(late: Callable[[Any, torch.Tensor], torch.Tensor]) -> tuple[nn.Module, nn.Module]:
    """A model, and another that is planned."""
    torch.manual_seed(0)
    model = nn.Sequential(Block(late), Block(late), nn.Linear(WIDTH, 2))
    planned = copy.deepcopy(model)
    plan = Technique(name="recompute", where=("Sequential.0", "Sequential.1"))
    RECOMPUTE.apply({"Sequential": planned}, plan)
    return model, planned


@pytest.mark.parametrize("late", LATER.values(), ids=LATER)
def test_what_a_block_begins_to_write_it_writes_once(late: Any) -> None:
    model, planned = pair(late)
    assert run(planned) == run(model)


@pytest.mark.parametrize("name", ["in place", "by a kernel", "rebound", "two of one memory"])
def test_memory_that_is_shared_with_others_is_copied(name: str) -> None:
    model, planned = pair(LATER[name])
    for one in (model, planned):
        for buffer in one.buffers():
            buffer.share_memory_()
    assert run(planned) == run(model)


def test_a_buffer_that_a_kernel_touches_and_leaves_is_not_written() -> None:
    def touched(block: Any, x: torch.Tensor) -> torch.Tensor:
        return x + float(block.mean.numpy().sum())

    model, planned = pair(touched)
    assert run(planned) == run(model)


ODD = {
    "empty": torch.zeros(0, 3),
    "complex": torch.zeros(3, dtype=torch.complex64),
    "expanded": torch.zeros(1).expand(4),
    "not contiguous": torch.zeros(3, 2).t(),
    "sparse": torch.eye(3).to_sparse(),
    "of bits": torch.zeros(3, dtype=torch.bool),
    "half": torch.zeros(3, dtype=torch.float16),
    "without memory": torch.zeros(3, device="meta"),
}


@pytest.mark.parametrize("odd", ODD.values(), ids=ODD)
def test_odd_buffers_are_let_through(odd: torch.Tensor) -> None:
    model, planned = pair(LATER["in place"])
    planned[0].register_buffer("odd", odd, persistent=False)
    assert run(planned) == run(model)


def test_a_mode_of_inference_is_let_through() -> None:
    with torch.inference_mode():
        buffer = torch.zeros(3)
    model, planned = pair(LATER["in place"])
    planned[0].register_buffer("odd", buffer, persistent=False)
    assert run(planned) == run(model)


def bias_written(model: Any) -> None:
    with torch.no_grad():
        model[0].linear.bias.add_(1)


@pytest.mark.parametrize(
    "between",
    [bias_written, lambda model: model[0].mean.add_(1)],
    ids=["a parameter", "a buffer"],
)
def test_what_is_written_between_forward_and_backward_stops_the_run(between: Any) -> None:
    model, planned = pair(lambda block, x: x - block.mean)
    run(model, between)
    with pytest.raises(ApplyFailed, match="between its forward and its backward"):
        run(planned, between)


def test_what_is_put_in_place_between_forward_and_backward_is_not_read() -> None:
    def between(model: Any) -> None:
        model[0].mean, model[0].shift = model[0].mean + 1, model[0].shift + 1

    model, planned = pair(lambda block, x: x * (1 + block.shift) - block.mean)
    assert run(planned, between) == run(model, between)


def test_a_parameter_that_the_block_writes_stops_the_run() -> None:
    def late(block: Any, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            block.linear.weight.mul_(0.9)
        return x

    with pytest.raises(ApplyFailed, match=r"writes to `block.linear.weight` at"):
        pair(late)


def test_a_parameter_that_is_written_where_no_source_shows_it_stops_the_run() -> None:
    def late(block: Any, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            eval("block.linear.weight.mul_(0.9)")
        return x

    _, planned = pair(late)
    with pytest.raises(ApplyFailed, match="writes to its parameter `weight`"):
        run(planned)


def test_weights_that_a_functional_call_puts_in_are_those_of_the_second_run() -> None:
    model, planned = pair(lambda block, x: x)
    found = []
    for one in (model, planned):
        weights = {name: (value * 1.5).detach() for name, value in one.named_parameters()}
        x = torch.ones(3, WIDTH, requires_grad=True)
        torch.func.functional_call(one, weights, x).sum().backward()
        found.append(x.grad)
    assert torch.equal(*found)


def add_hook(model: Any) -> None:
    seen = model.__dict__.setdefault("seen", [])
    model[0].register_forward_hook(lambda *_: seen.append(1))


def replace_forward(model: Any) -> None:
    seen, old = model.__dict__.setdefault("seen", []), model[0].linear.forward

    def forward(x: torch.Tensor) -> torch.Tensor:
        seen.extend([1])
        return old(x)

    model[0].linear.forward = forward


@pytest.mark.parametrize("change", [add_hook, replace_forward])
def test_code_that_comes_later_runs_once(
    change: Callable[[Any], None], capsys: pytest.CaptureFixture[str]
) -> None:
    model, planned = pair(lambda block, x: x)
    first = run(model), run(planned)
    for one in (model, planned):
        change(one)
    assert first[0] == first[1]
    assert run(planned) == run(model)
    assert model.seen == planned.seen
    assert "without the plan from now on" in capsys.readouterr().err


@pytest.mark.parametrize("kind", ["spectral norm", "another block"])
def test_a_module_that_comes_later_is_watched_too(kind: str) -> None:
    results = []
    for one in pair(LATER["in place"]):
        run(one)
        torch.manual_seed(5)
        if kind == "spectral norm":
            nn.utils.parametrizations.spectral_norm(one[0].linear)
        else:
            one[0].linear = nn.Sequential(nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, WIDTH))
        results.append(run(one))
    assert results[0] == results[1]


def test_each_rerun_has_the_modules_of_its_own_forward() -> None:
    results = []
    for net in pair(LATER["in place"]):
        now["step"] = LATE
        first = net(torch.ones(8, WIDTH))
        before = net[0].linear
        torch.manual_seed(1)
        net[0].linear = nn.Sequential(nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, WIDTH))
        second = net(torch.ones(8, WIDTH))
        (first.sum() + second.sum()).backward()
        results.append([one.grad for one in (*before.parameters(), *net.parameters())])
    assert all(map(torch.equal, *results))


class Noting(nn.Module):
    """A layer whose code keeps a list."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.seen = nn.Linear(WIDTH, WIDTH), []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen.append(len(x))
        return self.linear(x)


def test_a_block_that_keeps_a_list_is_refused() -> None:
    with pytest.raises(ApplyFailed, match=r"calls `self.seen.append` at .*test_block_state.py"):
        BlockState([Noting()], "Net.block")


def test_what_was_written_can_be_taken_back() -> None:
    block = Block(LATER["a rebound tensor"])
    state = BlockState([block], "Net.block")
    before = state.begin()
    mean = block.mean
    block.mean.add_(3)
    block.count, block.average = 7, torch.ones(WIDTH)
    block.generator.random()
    written, drawn = before.has_run()
    assert written == ["average", "mean"]
    assert len(drawn) == 1
    before.restore()
    assert block.mean is mean
    assert (block.mean.sum(), block.average.sum(), block.count) == (0, 0, 0)
    assert block.generator.getstate() == random.Random(3).getstate()


@pytest.mark.parametrize("name", ["in place", "by a kernel", "rebound", "its own generators"])
def test_parts_of_a_batch_give_way_to_state_that_begins_late(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(Block(LATER[name]), nn.Linear(WIDTH, 2)).double()
    model[0].average = model[0].average.double()
    planned = nn.Sequential(copy.deepcopy(model[0]), copy.deepcopy(model[1])).double()
    planned[0].average = planned[0].average.double()
    plan = Technique(name="micro_batch", where=("Sequential.0",), options={"parts": 2})
    MICRO_BATCH.apply({"Sequential": planned}, plan)
    results = []
    for one in (model, planned):
        torch.manual_seed(1)
        for step in range(4):
            now["step"] = step
            one(torch.randn(8, WIDTH, dtype=torch.float64)).square().sum().backward()
        results.append([p.grad for p in one.parameters()] + list(one.buffers()))
    for a, b in zip(*results, strict=True):
        assert torch.allclose(a, b, rtol=1e-9, atol=1e-9)
    assert "without the plan from now on" in capsys.readouterr().err
