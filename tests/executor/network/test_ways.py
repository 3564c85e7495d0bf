"""Operators write to given places: every bit as they give by themselves, in place too."""

import functools

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchtrim.executor.network.capture import capture
from torchtrim.executor.network.captured import Captured
from torchtrim.executor.network.out_variants import way_of
from torchtrim.executor.network.program import NetworkProgram, Switches, graph_of, tensors_of


class Call(nn.Module):
    def __init__(self, function: object) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: Tensor) -> Tensor:
        return self.function(*args)  # type: ignore[operator]


def tensor(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


IMAGE = tensor(5, 6, 9, 7)
SPECIAL = torch.tensor([[-0.0, 0.0, float("nan"), float("inf"), -1.0, 2.0]] * 4)
CASES = {
    "relu": (F.relu, (SPECIAL,)),
    "gelu": (F.gelu, (IMAGE,)),
    "silu": (F.silu, (IMAGE,)),
    "hardswish": (F.hardswish, (IMAGE,)),
    "leaky relu": (F.leaky_relu, (IMAGE,)),
    "threshold": (lambda x: F.threshold(x, 0, 1e-6), (SPECIAL,)),
    "sum": (torch.add, (IMAGE, tensor(6, 1, 1, seed=1))),
    "product of one": (lambda x: x * x, (IMAGE,)),
    "clone": (lambda x: x.clone(), (IMAGE,)),
    "change of type": (lambda x: x.to(torch.float64), (IMAGE,)),
    "transposed": (lambda x: x.transpose(1, 2).contiguous(), (IMAGE,)),
    "linear": (F.linear, (tensor(3, 4, 5), tensor(7, 5), tensor(7))),
    "linear without bias": (F.linear, (tensor(3, 4, 5), tensor(7, 5))),
    "linear of no features": (F.linear, (tensor(3, 4, 0), tensor(7, 0), tensor(7))),
    "linear of a transposed": (lambda x, w: F.linear(x.t(), w), (tensor(5, 4), tensor(7, 5))),
    "linear of a transposed, bias": (
        lambda x, w, b: F.linear(x.t(), w, b),
        (tensor(5, 4), tensor(7, 5), tensor(7)),
    ),
    "linear of rows out of order": (
        lambda x, w, b: F.linear(x.transpose(1, 2), w, b),
        (tensor(3, 5, 4), tensor(7, 5), tensor(7)),
    ),
    "linear of rows out of order, no bias": (
        lambda x, w: F.linear(x.transpose(1, 2), w),
        (tensor(3, 5, 4), tensor(7, 5)),
    ),
    "linear of rows with gaps": (
        lambda x, w, b: F.linear(x[..., :5], w, b),
        (tensor(2, 3, 4, 6), tensor(7, 5), tensor(7)),
    ),
    "matmul": (torch.matmul, (tensor(2, 3, 4), tensor(2, 4, 5))),
    "softmax": (lambda x: F.softmax(x, 1), (IMAGE,)),
    "log softmax": (lambda x: F.log_softmax(x, -1), (IMAGE,)),
    "softmax of another type": (lambda x: F.softmax(x, 1, dtype=torch.float64), (IMAGE,)),
    "cat": (lambda a, b: torch.cat((a, b), 1), (IMAGE, IMAGE)),
    "max pooling": (lambda x: F.max_pool2d(x, 3, 2, 1), (IMAGE,)),
    "max pooling, ceiled": (lambda x: F.max_pool2d(x, 2, ceil_mode=True), (IMAGE,)),
    "max pooling with places": (lambda x: F.max_pool2d(x, 2, return_indices=True)[1], (IMAGE,)),
    "max pooling, channels last": (
        lambda x: F.max_pool2d(x, 2),
        (IMAGE.to(memory_format=torch.channels_last),),
    ),
    "average pooling": (lambda x: F.avg_pool2d(x, 2), (IMAGE,)),
    "adaptive pooling": (lambda x: F.adaptive_avg_pool2d(x, 3), (IMAGE,)),
    "adaptive pooling to one": (lambda x: F.adaptive_avg_pool2d(x, 1), (IMAGE,)),
    "padding": (lambda x: F.pad(x, (1, 2, 0, 3)), (IMAGE,)),
    "padding with a number": (lambda x: F.pad(x, (1, 1), value=-7.5), (IMAGE,)),
    "cropping": (lambda x: F.pad(x, (-1, 2)), (IMAGE,)),
    "padding by reflection": (lambda x: F.pad(x, (1, 1, 1, 1), mode="reflect"), (IMAGE,)),
    "norm": (
        lambda x, m, v, w, b: F.batch_norm(x, m, v, w, b),
        (IMAGE, tensor(6), tensor(6).abs(), tensor(6, seed=2), tensor(6, seed=3)),
    ),
    "layer norm": (lambda x: F.layer_norm(x, (7,)), (IMAGE,)),
    "group norm": (lambda x: F.group_norm(x, 2), (IMAGE,)),
    "attention": (F.scaled_dot_product_attention, (tensor(3, 2, 5, 4),) * 3),
    "up": (lambda x: F.interpolate(x, scale_factor=2, mode="bilinear"), (IMAGE,)),
    "embedding": (F.embedding, (torch.arange(6).view(2, 3), tensor(9, 4))),
    "mean": (lambda x: x.mean((2, 3)), (IMAGE,)),
    "lengthened": (lambda x: x[:1].expand(4, -1, -1, -1) + 1, (IMAGE,)),
    "cumulative": (lambda x: x.cumsum(1), (IMAGE,)),
}


@functools.cache
def captured_of(name: str) -> tuple[Captured, tuple[Tensor, ...], Tensor]:
    function, inputs = CASES[name]
    model = Call(function).eval()
    with torch.no_grad():
        return capture(model, inputs, {}), inputs, model(*inputs)


@pytest.mark.parametrize("name", CASES)
def test_every_bit_is_as_it_gives_by_itself(name: str) -> None:
    captured, inputs, wanted = captured_of(name)
    with torch.no_grad():
        for switches in (Switches(), Switches(in_place=False), Switches(arena=False)):
            (got,) = NetworkProgram(captured, switches).run(list(inputs), {})
            assert got.dtype == wanted.dtype
            assert torch.equal(got.nan_to_num(9), wanted.nan_to_num(9))
            assert torch.equal(torch.signbit(got), torch.signbit(wanted))


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("most", [1, 1 << 30])
def test_a_written_place_holds_the_same(name: str, most: int) -> None:
    """Whatever is written in slices, in the smallest and in the largest."""
    captured, inputs, wanted = captured_of(name)
    op = captured.ops[-1]
    way = way_of(op, captured.values, most)
    if way is None or len(captured.ops) > 1:
        return
    value = captured.values[op.outputs[0]]
    place = torch.full_like(torch.empty_strided(value.shape, value.strides, dtype=value.dtype), 3)
    env = {source.value: inputs[int(source.key)] for source in captured.sources}
    args = torch.utils._pytree.tree_map(
        lambda x: env[x.value] if hasattr(x, "value") else x,
        op.args,
        is_leaf=lambda x: hasattr(x, "value"),
    )
    with torch.no_grad():
        way.write(args, op.kwargs, place)
    assert torch.equal(place.nan_to_num(9), wanted.nan_to_num(9))


@pytest.mark.parametrize("trains", [True, False], ids=["weights that train", "frozen"])
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
@pytest.mark.parametrize("batch", [1, 16])
def test_a_product_of_rows_out_of_order(trains: bool, bias: bool, batch: int) -> None:
    """An MLP-Mixer's: torch picks its kernel by whether the weights train, even without gradients."""
    torch.manual_seed(0)
    model = Mixing(nn.Linear(49, 96, bias=bias)).eval().requires_grad_(trains)
    x = torch.randn(batch, 49, 64)
    with torch.no_grad():
        captured, wanted = capture(model, (x,), {}), model(x)
        program = NetworkProgram(captured, Switches())
        (got,) = program.run([x], tensors_of(model, captured))
        assert torch.equal(got, wanted)
        assert all(node.writes for node in program.graph.nodes if "linear" in node.name)


class Mixing(nn.Module):
    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.linear = linear

    def forward(self, x: Tensor) -> Tensor:
        return F.gelu(self.linear(x.transpose(1, 2)))


def test_which_operators_of_a_network_cannot_write_to_a_place() -> None:
    captured, _, _ = captured_of("cumulative")
    assert graph_of(captured)[0].nodes[0].writes
    captured, _, _ = captured_of("embedding")
    assert not graph_of(captured)[0].nodes[0].writes


CONVOLUTIONS = {
    "3x3": (16, 16, 3, 1, 1, 1, 1),
    "1x1": (16, 24, 1, 1, 0, 1, 1),
    "strided": (16, 8, 3, 2, 1, 1, 1),
    "dilated": (8, 8, 3, 1, 2, 2, 1),
    "by channel": (8, 8, 3, 1, 1, 1, 8),
    "odd": (7, 5, 5, 1, 2, 1, 1),
}


@pytest.mark.parametrize("kind", CONVOLUTIONS)
@pytest.mark.parametrize("batch", [1, 4, 20])
@pytest.mark.parametrize("last", [False, True])
def test_convolutions_in_slices_have_every_bit(kind: str, batch: int, last: bool) -> None:
    torch.manual_seed(0)
    inside, outside, size, stride, pad, dilation, groups = CONVOLUTIONS[kind]
    model = nn.Conv2d(inside, outside, size, stride, pad, dilation, groups).eval()
    x = torch.randn(batch, inside, 14, 14)
    x = x.to(memory_format=torch.channels_last) if last else x
    with torch.no_grad():
        captured, wanted = capture(model, (x,), {}), model(x)
        way = way_of(captured.ops[0], captured.values, 1)
        assert way is not None
        place = torch.empty_like(wanted)
        tensors = tensors_of(model, captured)
        way.write((x, *tensors.values(), *captured.ops[0].args[3:]), {}, place)
        assert torch.equal(place, wanted)
