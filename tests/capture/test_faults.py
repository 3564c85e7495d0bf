"""Whatever a script does while it is recorded, it does as if it were not."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

from capture.loops import Loop, made_by, operators, record
from torchtrim.capture.allocator import CpuAllocator
from torchtrim.records.profile import Profile

CASES: dict[str, Callable[[torch.Tensor], Any]] = {}


def case(function: Callable[[torch.Tensor], Any]) -> Callable[[torch.Tensor], Any]:
    CASES[function.__name__] = function
    return function


def recorded(body: Callable[[torch.Tensor], Any]) -> Profile:
    """The profile of a step with this in the middle of it."""
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def loop() -> None:
        for _ in range(3):
            output = model(torch.ones(3, 4))
            body(output)
            output.sum().backward()
            optimizer.step()
            optimizer.zero_grad()

    return record(loop, allocator=CpuAllocator())


class Wrapper(torch.Tensor):
    """A tensor in a tensor, with a dispatch of its own."""

    inner: torch.Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> Any:
        wrapper = torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)
        wrapper.inner = inner
        return wrapper

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        inner = [arg.inner if isinstance(arg, Wrapper) else arg for arg in args]
        return Wrapper(func(*inner, **(kwargs or {})))


class Logging(torch.Tensor):
    """Counts what it is asked for."""

    asked = 0

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        Logging.asked += 1
        return super().__torch_function__(func, types, args, kwargs or {})


class Simple(torch.Tensor):
    """Nothing more."""


@case
def sparse(y: torch.Tensor) -> None:
    torch.sparse.mm(torch.eye(3).to_sparse(), y).sum()
    torch.eye(3).to_sparse().coalesce().to_dense()


@case
def sparse_rows(y: torch.Tensor) -> None:
    torch.eye(3).to_sparse_csr() @ y


@case
def sparse_gradients(y: torch.Tensor) -> None:
    weight = torch.ones(10, 4, requires_grad=True)
    nn.functional.embedding(torch.tensor([1, 2]), weight, sparse=True).sum().backward()
    assert weight.grad is not None
    assert weight.grad.is_sparse


@case
def meta(y: torch.Tensor) -> None:
    torch.empty(1 << 40, device="meta").add(1).sum()


@case
def complex_numbers(y: torch.Tensor) -> None:
    torch.view_as_real(torch.fft.fft(y).conj().resolve_conj()).sum().backward(retain_graph=True)


@case
def low_precision(y: torch.Tensor) -> None:
    (y.bfloat16() * 2).half().float()
    y.detach().to(torch.float8_e4m3fn).float()


@case
def from_numpy(y: torch.Tensor) -> None:
    (torch.from_numpy(np.ones((3, 4), "f4")) * y).sum()


@case
def no_elements(y: torch.Tensor) -> None:
    torch.cat([torch.empty(0, 4) @ torch.ones(4, 4), y]).sum()
    torch.empty(0).sum()


@case
def parameters(y: torch.Tensor) -> None:
    nn.Parameter(torch.ones(3)).mul(2).sum().backward()


@case
def simple_subclass(y: torch.Tensor) -> None:
    simple = torch.ones(3, 4).as_subclass(Simple)
    assert type(simple * y) is Simple
    (simple * y).sum().backward(retain_graph=True)


@case
def wrapper_subclass(y: torch.Tensor) -> None:
    assert torch.equal((Wrapper(torch.ones(3, 4)) * 2 + 1).inner, torch.full((3, 4), 3.0))


@case
def nested(y: torch.Tensor) -> None:
    tensors = [torch.ones(2, 3), torch.ones(1, 3)]
    (torch.nested.nested_tensor(tensors) * 2).to_padded_tensor(0.0)
    (torch.nested.nested_tensor(tensors, layout=torch.jagged) * 2).sum()


@case
def quantized(y: torch.Tensor) -> None:
    torch.quantize_per_tensor(y.detach(), 0.1, 0, torch.quint8)[0].dequantize()


@case
def opaque(y: torch.Tensor) -> None:
    torch.ones(3, 3).to_mkldnn().to_dense()


@case
def functional_transforms(y: torch.Tensor) -> None:
    torch.func.vmap(torch.sin)(y)
    torch.func.jacrev(torch.square)(torch.ones(3))
    torch.autograd.functional.hessian(lambda x: x.pow(3).sum(), torch.ones(3))


@case
def fake(y: torch.Tensor) -> None:
    with FakeTensorMode():
        product = torch.empty(1000, 1000) @ torch.empty(1000, 1000)
    assert product.add(1).shape == (1000, 1000)


@case
def an_operator_that_raises(y: torch.Tensor) -> None:
    with pytest.raises(RuntimeError, match="size"):
        torch.ones(3) @ torch.ones(4)


@case
def resized(y: torch.Tensor) -> None:
    tensor = torch.ones(4).resize_(100)
    tensor.untyped_storage().resize_(0)
    tensor.untyped_storage().resize_(400)
    tensor.zero_().set_(torch.ones(8))
    tensor.data = torch.ones(16)
    tensor.share_memory_().add_(1)


@case
def read_by_the_host(y: torch.Tensor) -> None:
    assert y.sum().item() == pytest.approx(float(y.detach().numpy().sum()), rel=1e-4)
    y.tolist()


@case
def copied_and_saved(y: torch.Tensor) -> None:
    model, file = copy.deepcopy(nn.Linear(4, 4)), io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    model.load_state_dict(torch.load(file))


@case
def another_mode(y: torch.Tensor) -> None:
    with FlopCounterMode(display=False) as counter:
        y @ torch.ones(4, 4)
    assert counter.get_total_flops() == 2 * 3 * 4 * 4


@case
def deterministic(y: torch.Tensor) -> None:
    torch.use_deterministic_algorithms(True)
    try:
        assert torch.empty(5).isnan().all()
    finally:
        torch.use_deterministic_algorithms(False)


@case
def inference_mode(y: torch.Tensor) -> None:
    with torch.inference_mode():
        nn.Linear(4, 4)(torch.ones(3, 4))


@case
def traced(y: torch.Tensor) -> None:
    torch.jit.trace(nn.Linear(4, 2), torch.ones(1, 4))(y)


@case
def no_gradient(y: torch.Tensor) -> None:
    other = torch.ones(3, requires_grad=True)
    assert torch.autograd.grad(y.sum(), other, allow_unused=True, retain_graph=True) == (None,)


@torch.library.custom_op("torchtrim_test::double", mutates_args=())
def double(x: torch.Tensor) -> torch.Tensor:
    return x * 2


@case
def custom_operator(y: torch.Tensor) -> None:
    assert torch.equal(double(y.detach()), y.detach() * 2)


@case
def compiled(y: torch.Tensor) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    expected = model(torch.ones(3, 4))
    output = torch.compile(model, backend="aot_eager")(torch.ones(3, 4))
    assert torch.equal(output, expected)
    output.sum().backward()


@case
def higher_order_operator(y: torch.Tensor) -> None:
    x = torch.ones(3)
    assert torch.cond(x.sum() > 0, torch.sin, torch.cos, (x,)).equal(x.sin())


@pytest.mark.parametrize("name", CASES)
@pytest.mark.filterwarnings("ignore")
def test_a_script_runs_as_it_would(name: str) -> None:
    profile = recorded(CASES[name])
    assert made_by(profile, "aten::addmm")[0].bytes == 48
    assert len(operators(profile, "optimizer")) == 2
    assert profile.tracked_peak_bytes < 1 << 20
    assert torch._C._len_torch_dispatch_stack() == 0


@pytest.mark.xfail(reason="torch allows it under no dispatch mode")
def test_a_subclass_made_from_data() -> None:
    assert recorded(lambda y: Simple([1.0, 2.0]))


def test_a_subclass_is_asked_for_nothing_more() -> None:
    counts = []

    def body(y: torch.Tensor) -> None:
        Logging.asked = 0
        (torch.ones(3, 4).as_subclass(Logging) * y).sum().backward(retain_graph=True)
        counts.append(Logging.asked)

    model = nn.Linear(4, 4)
    body(model(torch.ones(3, 4)))
    recorded(body)
    assert len(set(counts)) == 1


def test_what_is_inside_of_a_wrapper_is_recorded() -> None:
    profile = recorded(lambda y: Wrapper(torch.ones(30, 4)) * 2)
    (product,) = made_by(profile, "aten::mul")
    assert product.bytes == 30 * 4 * 4


def test_sparse_gradients_are_counted() -> None:
    model = nn.EmbeddingBag(1000, 8, mode="sum", sparse=True)
    optimizer = torch.optim.SparseAdam(model.parameters())

    def loop() -> None:
        for _ in range(3):
            model(torch.arange(20).view(2, 10)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()

    gradients = [s for s in record(loop).storages if s.kind == "gradient"]
    assert sum(s.bytes for s in gradients) >= 20 * 8 * 4
    assert {s.name for s in gradients} == {"EmbeddingBag.weight"}


def test_a_step_that_ends_inside_of_the_scripts_own_mode() -> None:
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    flops = []

    def loop() -> None:
        for _ in range(4):
            with FlopCounterMode(display=False) as counter:
                model(torch.ones(3, 4)).sum().backward()
                model(torch.ones(3, 4)).sum().backward()
            flops.append(counter.get_total_flops())
            optimizer.step()

    profile = record(loop)
    assert flops == [flops[0]] * 4
    assert flops[0] > 0
    assert len(operators(profile, "forward", "aten::addmm")) == 2


def test_an_exception_in_a_step_leaves_nothing_on() -> None:
    loop = Loop(warmup=0, allocator=CpuAllocator())
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(3, 3))
    with pytest.raises(RuntimeError), loop.watcher:
        model(torch.ones(2, 2))
    recording = loop.recording
    assert recording is not None
    assert recording.running
    recording.abandon()
    recording.abandon()
    assert not recording.running
    assert torch._C._len_torch_dispatch_stack() == 0
    assert not torch.autograd._profiler_enabled()


def test_a_batch_that_holds_itself() -> None:
    class Ignores(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(2))

        def forward(self, tree: Any) -> torch.Tensor:
            return self.weight * tree["x"]

    model = Ignores()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    tree: dict[str, Any] = {"x": torch.ones(2)}
    tree["children"] = [tree, {"parent": tree}]

    def loop() -> None:
        for _ in range(2):
            model(tree).sum().backward()
            optimizer.step()

    assert len(record(loop).calls) == 1
