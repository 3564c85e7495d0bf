"""A planned model lives on: other sizes, threads, hooks, modes, state, copies; and comes back as it was."""

import copy
import gc
import threading

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import torchtrim
from models import ResidualBlock
from torchtrim.executor.network import planned
from torchtrim.executor.network.planned import Planned


class Net(nn.Module):
    """Convolutions, a norm, a skip, pooling and a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.block = ResidualBlock(8)
        self.head = nn.Linear(8 * 16, 5)
        self.scale = 1.0

    def forward(self, x: Tensor, *, flip: bool = False) -> Tensor:
        x = F.max_pool2d(F.relu(self.stem(x)), 2)
        x = self.block(x.flip(3) if flip else x) * self.scale
        return self.head(F.adaptive_avg_pool2d(x, 4).flatten(1))


@pytest.fixture
def net() -> Net:
    torch.manual_seed(0)
    net = Net()
    for norm in (net.block.norm1, net.block.norm2):
        norm.running_mean.normal_()
        norm.running_var.uniform_(0.5, 2)
    return net.eval()


def images(batch: int = 6) -> Tensor:
    return torch.randn(batch, 3, 16, 16, generator=torch.Generator().manual_seed(batch))


def optimized(
    net: nn.Module, inputs: Tensor | None = None, **options: object
) -> torchtrim.FittedMemory:
    given = images() if inputs is None else inputs
    return torchtrim.optimize_memory(net, given, verify=False, **options)


def plain(net: nn.Module, *args: Tensor, **kwargs: object) -> Tensor:
    """What the model computes when it is not planned: a copy is not."""
    with torch.no_grad():
        return copy.deepcopy(net)(*args, **kwargs)


def programs(net: nn.Module) -> int:
    known = Planned.known(net)
    return len([p for p in known._plans.values() if p is not None]) if known else 0


def test_another_batch_and_another_argument_get_plans_of_their_own(net: Net) -> None:
    with optimized(net):
        for batch in (6, 3, 1, 6, 3):
            assert torch.equal(net(images(batch)), plain(net, images(batch)))
        assert torch.equal(net(images(), flip=True), plain(net, images(), flip=True))
        assert programs(net) == 4


def test_plans_do_not_grow_without_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planned, "MOST_PLANS", 4)
    net = nn.Sequential(nn.Linear(4, 4), nn.ReLU()).eval()
    with optimized(net, torch.ones(1, 4)):
        for batch in range(1, 10):
            net(torch.ones(batch, 4))
        assert programs(net) == 4


def test_results_of_one_call_are_not_overwritten_by_the_next(net: Net) -> None:
    with optimized(net):
        first = net(images())
        kept = first.clone()
        net(images() * 3)
        assert torch.equal(first, kept)


def test_inputs_are_not_overwritten(net: Net) -> None:
    inputs = images()
    with optimized(net):
        net(inputs)
    assert torch.equal(inputs, images())


@pytest.mark.slow
def test_nothing_grows_over_ten_thousand_calls() -> None:
    net = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2)).eval()
    inputs = torch.randn(4, 8)

    def tensors() -> int:
        gc.collect()
        return sum(issubclass(type(thing), Tensor) for thing in gc.get_objects())

    with optimized(net, inputs):
        net(inputs)
        before = tensors()
        for _ in range(10_000):
            net(inputs)
        assert tensors() == before
        assert programs(net) == 1


def test_threads_have_an_arena_each(net: Net) -> None:
    sizes = (2, 5, 6, 7)
    wanted = {batch: plain(net, images(batch)) for batch in sizes}
    wrong: list[int] = []

    def serve(batch: int) -> None:
        for _ in range(20):
            if not torch.equal(net(images(batch)), wanted[batch]):
                wrong.append(batch)

    with optimized(net):
        for batch in sizes[:-1]:
            net(images(batch))
        threads = [threading.Thread(target=serve, args=(batch,)) for batch in (*sizes, *sizes)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert programs(net) == len(sizes) - 1
    assert wrong == []


def test_train_runs_the_original_and_eval_the_plan_again(net: Net) -> None:
    with optimized(net):
        mean = net.block.norm1.running_mean.clone()
        net.train()
        net(images()).sum().backward()
        assert net.stem.weight.grad is not None
        assert not torch.equal(net.block.norm1.running_mean, mean)
        net.eval()
        assert not net(images()).requires_grad
        assert torch.equal(net(images()), plain(net, images()))


def test_an_input_that_wants_gradients_gets_them(net: Net) -> None:
    with optimized(net):
        inputs = images().requires_grad_()
        net(inputs).sum().backward()
        assert inputs.grad is not None


def test_loaded_and_changed_values_count(net: Net) -> None:
    other = Net().eval()
    with optimized(net):
        net.load_state_dict(other.state_dict())
        assert torch.equal(net(images()), plain(other, images()))
        net.head.weight.data.zero_()
        net.head.bias = nn.Parameter(torch.ones(5))
        assert torch.equal(net(images()), torch.ones(6, 5))


def test_changed_attributes_and_modules_count(net: Net) -> None:
    with optimized(net):
        net.scale = 0.0
        assert torch.equal(net(images()), net.head.bias.detach().expand(6, 5))
        net.scale = 1.0
        net.block = nn.Identity()
        assert torch.equal(net(images()), plain(net, images()))


def test_another_type_is_planned_anew(net: Net) -> None:
    with optimized(net):
        net.double()
        assert torch.equal(net(images().double()), plain(net, images().double()))
        net.to("cpu", torch.float32)
        assert torch.equal(net(images()), plain(net, images()))


def test_a_copy_and_a_pickle_are_the_original(net: Net) -> None:
    with optimized(net):
        twin = copy.deepcopy(net)
        assert type(twin) is Net
        assert torch.equal(twin(images()), net(images()))
        assert twin(images()).requires_grad


def test_what_it_serves_loads_without_it(net: Net) -> None:
    before = {name: value.clone() for name, value in net.state_dict().items()}
    with optimized(net):
        net(images())
        after = net.state_dict()
        assert list(after) == list(before)
        assert all(torch.equal(after[name], before[name]) for name in before)
    assert type(net) is Net
    assert all(torch.equal(net.state_dict()[name], before[name]) for name in before)


def test_hooks_of_the_root_still_run(net: Net) -> None:
    seen: list[tuple[int, ...]] = []
    handle = net.register_forward_hook(lambda _, __, out: seen.append(tuple(out.shape)))
    with optimized(net) as fitted:
        net(images())
        assert seen == [(6, 5)]
        assert fitted.notes == ()
    handle.remove()
    assert not net._forward_hooks


def test_hooks_inside_are_kept_by_planning_around_them(net: Net) -> None:
    seen: list[int] = []
    net.block.conv1.register_forward_hook(lambda *_: seen.append(1))
    with optimized(net) as fitted:
        assert "hooks" in fitted.notes[0]
        assert torch.equal(net(images()), plain(net, images()))
    assert len(seen) == 2


def test_revert_brings_back_gradients_with_their_sharing_and_strides(net: Net) -> None:
    block = torch.randn(400)
    net.stem.weight.grad = block[:216].view(8, 3, 3, 3).transpose(2, 3)
    net.stem.bias.grad = block[100:108]
    net.head.bias.grad = torch.zeros(5)
    before = block.clone()
    wanted = [net.stem.weight.grad.clone(), net.stem.bias.grad.clone()]
    strides = net.stem.weight.grad.stride()
    fitted = optimized(net)
    assert all(p.grad is None for p in net.parameters())
    assert (fitted.before.gradients, fitted.after.gradients) == (1620, 0)
    del block
    fitted.revert()
    weight, bias = net.stem.weight.grad, net.stem.bias.grad
    assert torch.equal(weight, wanted[0])
    assert torch.equal(bias, wanted[1])
    assert weight.stride() == strides
    assert weight.untyped_storage().data_ptr() == bias.untyped_storage().data_ptr()
    assert torch.equal(torch.empty(0).set_(weight.untyped_storage(), 0, (400,)), before)
    assert torch.equal(net.head.bias.grad, torch.zeros(5))
    assert net.head.weight.grad is None


def test_a_failure_inside_leaves_the_model_usable(net: Net) -> None:
    with optimized(net):
        with pytest.raises(RuntimeError):
            net(torch.randn(2, 4, 16, 16))
        assert torch.equal(net(images()), plain(net, images()))
    assert type(net) is Net


def test_applied_twice_and_reverted_in_any_order(net: Net) -> None:
    one, two = optimized(net), optimized(net)
    one.revert()
    assert torch.equal(net(images()), plain(net, images()))
    two.revert()
    assert type(net) is Net
    two.revert()
    assert type(net) is Net


class Branching(nn.Module):
    """Control flow that depends on values, around a part that has none."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList(
            nn.Sequential(nn.Conv2d(3, 3, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2))
            for _ in range(2)
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.parts[0](x) if x.sum() > 0 else self.parts[1](x)


def test_where_there_is_no_graph_the_modules_inside_are_planned() -> None:
    model = Branching().eval()
    inputs = torch.rand(4, 3, 8, 8)
    with optimized(model, inputs) as fitted:
        assert "module by module" in fitted.notes[0]
        for given in (inputs, -inputs):
            assert torch.equal(model(given), plain(model, given))
        assert programs(model.parts[0]) == programs(model.parts[1]) == 1
        with pytest.raises(torchtrim.Unsupported, match="no graph"):
            fitted.graph()
    assert type(model.parts[0]) is nn.Sequential


class Counting(nn.Module):
    """Changes itself at each call."""

    def __init__(self) -> None:
        super().__init__()
        self.calls, self.seen = 0, []
        self.inner = nn.Sequential(nn.Linear(4, 4), nn.ReLU())

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.seen.append(x)
        return self.inner(x) * self.calls


def test_a_model_that_changes_itself_is_not_frozen() -> None:
    model = Counting().eval()
    with optimized(model, torch.ones(2, 4)) as fitted:
        assert (model.calls, model.seen) == (0, [])
        assert "attributes" in fitted.notes[0]
        one, two = model(torch.ones(2, 4)), model(torch.ones(2, 4))
    assert torch.equal(two, one * 2)
    assert model.calls == len(model.seen) == 2


class Writes(nn.Module):
    """Writes a buffer and one of its inputs, and returns a view of the other."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(3))

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        self.count.add_(x.sum(0))
        x.mul_(2)
        return x + self.count, y[1:]


def test_what_a_model_writes_is_written() -> None:
    one, two = Writes().eval(), Writes().eval()
    x, y = torch.ones(2, 3), torch.arange(4.0)
    with torchtrim.optimize_memory(one, (x.clone(), y), verify=False):
        for _ in range(2):
            a, b = x.clone(), x.clone()
            got, wanted = one(a, y), two(b, y)
            assert torch.equal(got[0], wanted[0])
            assert got[1].data_ptr() == wanted[1].data_ptr()
            assert torch.equal(a, b)
            assert torch.equal(one.count, two.count)


def test_random_operators_draw_in_their_order() -> None:
    class Noisy(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return F.dropout(x, 0.5) + torch.rand_like(x) + F.dropout(x * 2, 0.5)

    model = Noisy().eval()
    x = torch.ones(4, 4)
    torch.manual_seed(3)
    wanted = model(x)
    with optimized(model, x):
        torch.manual_seed(3)
        assert torch.equal(model(x), wanted)


def test_under_autocast_as_without_a_plan(net: Net) -> None:
    with optimized(net), torch.autocast("cpu", torch.bfloat16):
        got = net(images())
        assert got.dtype is torch.bfloat16
        assert torch.equal(got, plain(net, images()))


class Convolutions(TorchDispatchMode):
    """Counts the convolutions that run."""

    count = 0

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += "convolution" in func.name()
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("arena", [False, True])
def test_only_what_sets_the_peak_runs_in_slices(arena: bool) -> None:
    """Each slice has costs of its own, so where memory is left a convolution has as few as it can."""
    torch.manual_seed(0)
    wide = nn.Sequential(nn.Conv2d(3, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU())
    narrow = [nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.ReLU()) for _ in range(4)]
    net = nn.Sequential(wide, nn.AvgPool2d(4), nn.Conv2d(32, 8, 1), *narrow).eval()
    x = torch.randn(16, 3, 64, 64)
    expected = plain(net, x)
    program = optimized(net, x, reuse_buffers=arena)
    with Convolutions() as seen:
        assert torch.equal(net(x), expected)
    whole, slices = 6, 16
    assert whole < seen.count <= whole + slices
    found = torchtrim.measure(lambda: net(x), warmup=1, device="cpu").peak_bytes
    base = torchtrim.measure(lambda: None, device="cpu").peak_bytes
    assert found - base <= program.after.outputs + program.after.workspace
