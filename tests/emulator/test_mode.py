from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchtrim import Unsupported
from torchtrim.emulator import Emulation

pytestmark = pytest.mark.usefixtures("device")


def on(*shape: int) -> Tensor:
    return torch.ones(shape, device="cuda")


MIXED: dict[str, Callable[[], Any]] = {
    "add": lambda: on(3) + torch.ones(3),
    "add in place": lambda: torch.ones(3).add_(on(3)),
    "a number of the device with the host": lambda: on() + torch.ones(3),
    "matmul": lambda: on(3, 3) @ torch.ones(3),
    "linear": lambda: nn.Linear(3, 3).cuda()(torch.ones(2, 3)),
    "convolution": lambda: nn.Conv1d(1, 1, 1)(on(1, 1, 3)),
    "batch norm": lambda: nn.BatchNorm1d(3).cuda()(torch.ones(2, 3)),
    "cat": lambda: torch.cat([on(3), torch.ones(3)]),
    "stack": lambda: torch.stack([torch.ones(3), on(3)]),
    "where": lambda: torch.where(on(3) > 0, on(3), torch.ones(3)),
    "embedding": lambda: nn.Embedding(3, 3).cuda()(torch.tensor([1])),
    "cross-entropy": lambda: F.cross_entropy(on(2, 3), torch.tensor([0, 1])),
    "gather": lambda: on(3).gather(0, torch.tensor([0])),
    "scatter": lambda: on(3).scatter_(0, torch.tensor([0]), 1.0),
    "mask of the device": lambda: torch.zeros(3)[on(3) > 0],
    "index of the device": lambda: torch.zeros(3)[torch.tensor([0], device="cuda")],
    "a number assigned by an index of the device": lambda: torch.zeros(3).__setitem__(
        torch.tensor([0], device="cuda"), 1.0
    ),
    "assigned rows of the host": lambda: on(3).__setitem__(torch.tensor([0, 1]), torch.ones(2)),
    "masked_fill": lambda: on(3).masked_fill(torch.tensor([True, False, True]), 0.0),
    "out": lambda: torch.add(on(3), 1, out=torch.empty(3)),
    "lists": lambda: torch._foreach_add([on(3)], [torch.ones(3)]),
    "equal": lambda: torch.equal(on(3), torch.ones(3)),
    "lstm": lambda: nn.LSTM(3, 3).cuda()(torch.ones(1, 1, 3)),
    "attention": lambda: F.scaled_dot_product_attention(
        on(1, 1, 2, 2), torch.ones(1, 1, 2, 2), on(1, 1, 2, 2)
    ),
    "einsum": lambda: torch.einsum("i,i->", on(3), torch.ones(3)),
}


@pytest.mark.parametrize(
    "where", [torch.tensor([0, 2]), torch.tensor([True, False, True]), [0, 2]], ids=repr
)
def test_a_number_is_assigned_where_an_index_of_the_host_says(where: object) -> None:
    x = on(3)
    x[where] = 7.0
    assert x.tolist() == [7.0, 1.0, 7.0]


@pytest.mark.parametrize("name", MIXED)
def test_two_devices_do_not_meet(name: str) -> None:
    with pytest.raises(RuntimeError, match=r"cuda:0 and cpu!.*aten::.*is on cpu"):
        MIXED[name]()


MEETING: dict[str, Callable[[], Any]] = {
    "a number of the host": lambda: on(3) * torch.tensor(2.0),
    "the number first": lambda: torch.tensor(2.0) - on(3),
    "where with a number": lambda: torch.where(on(3) > 0, on(3), torch.tensor(1.0)),
    "index of the host": lambda: on(3)[torch.tensor([0])],
    "mask of the host": lambda: on(3)[torch.tensor([True, False, True])],
    "a list": lambda: on(3)[[0, 2]],
    "masked_fill with a number": lambda: on(3).masked_fill(on(3) > 0, torch.tensor(2.0)),
    "bernoulli": lambda: torch.empty(3, device="cuda").bernoulli_(torch.full((3,), 0.5)),
    "clamp": lambda: on(3).clamp(min=torch.tensor(0.0)),
    "power": lambda: torch.pow(on(3), torch.tensor(2.0)),
}


@pytest.mark.parametrize("name", MEETING)
def test_what_of_the_host_may_meet_the_device(name: str) -> None:
    assert MEETING[name]().is_cuda


def test_what_may_be_written_into() -> None:
    x, host = on(3), torch.zeros(3)
    x[0] = torch.tensor(3.0)
    x[torch.tensor([1])] = torch.tensor(4.0)
    x[2:] = torch.tensor([5.0])
    host[:] = x
    host.copy_(x)
    assert host.tolist() == [3, 4, 5]
    assert host.is_cpu
    host.fill_(x[0])
    assert host.is_cpu
    assert host.tolist() == [3, 3, 3]


def test_an_operator_without_a_kernel_for_the_cpu_names_itself() -> None:
    q = on(1, 1, 8, 8)
    with pytest.raises(Unsupported, match=r"cannot run aten::_flash_attention_forward.*GPU"):
        torch.ops.aten._flash_attention_forward(q, q, q, None, None, 8, 8, 0.0, False, False)


def test_tensors_that_a_gradient_needs_lie_on_the_device() -> None:
    x = torch.randn(3, 4, device="cuda", requires_grad=True)
    (x[:, 1:].sum() + x[0, 0] + x.max() + x[x > 0].sum() + x.prod()).backward()
    assert x.grad is not None
    assert x.grad.is_cuda
    assert all(part.is_cuda for part in torch.autograd.grad((x * x).sum(), [x]))


def test_threads_emulate_too() -> None:
    seen: list[bool] = []

    def work() -> None:
        seen.append((torch.ones(3, device="cuda") * 2).is_cuda)

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    with ThreadPoolExecutor(2) as pool:
        seen += pool.map(lambda size: (on(size) + 1).is_cuda, range(1, 4))
    assert seen == [True] * 6


def test_inference_mode_shows_composites_as_the_device_has_them() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4)).cuda().eval()
    x = torch.randn(2, 4, device="cuda")
    with torch.inference_mode():
        y = model(x)
        hot = F.one_hot(torch.tensor([1], device="cuda"), 3)
        back = y.cpu()
    assert y.is_cuda
    assert hot.is_cuda
    assert back.is_cpu
    assert torch.equal(back, model(x).detach().cpu())


def test_tensors_of_the_host_join_an_adopted_model(device: Emulation) -> None:
    model = nn.Linear(3, 3)
    device.adopt(model)
    x = torch.ones(2, 3)
    assert model.weight.is_cuda
    assert model(x).is_cuda
    assert x.is_cuda


def test_higher_order_operators_and_anomaly_mode() -> None:
    x = torch.randn(3, device="cuda", requires_grad=True)
    with pytest.warns(UserWarning, match="Anomaly"), torch.autograd.detect_anomaly():
        (x * 2).sum().backward()
    assert torch.vmap(lambda row: row * 2)(x).is_cuda


def test_a_histogram_of_whole_numbers_is_one_of_the_devices_alone() -> None:
    numbers = torch.tensor([0, 2, 2, 3], dtype=torch.int32)
    found = torch.histc(numbers.cuda(), bins=4, min=0, max=3)
    assert found.is_cuda
    assert (found.dtype, found.tolist()) == (torch.int32, [1, 0, 2, 1])
    with pytest.raises(NotImplementedError):
        torch.histc(numbers, bins=4, min=0, max=3)
