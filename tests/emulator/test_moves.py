from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

import draws
from torchtrim.emulator import Emulation
from torchtrim.emulator.moves import is_cuda

pytestmark = pytest.mark.usefixtures("device")


@pytest.mark.parametrize("named", ["cuda", "cuda:0", torch.device("cuda"), 0])
def test_names_of_the_device(named: Any) -> None:
    assert is_cuda(named)
    assert torch.ones(2).to(named).is_cuda
    assert torch.ones(2).cuda(named).is_cuda
    assert nn.Linear(2, 2).to(named).weight.is_cuda


@pytest.mark.parametrize("named", ["cpu", torch.device("cpu"), "meta", None])
def test_names_of_others(named: Any) -> None:
    assert not is_cuda(named)


@pytest.mark.parametrize("named", ["cuda:1", torch.device("cuda", 3), 2])
def test_there_is_no_second_device(named: Any) -> None:
    for ask in (
        lambda: torch.ones(2).to(named),
        lambda: torch.ones(2).cuda(named),
        lambda: torch.tensor([1.0], device=named),
        lambda: torch.cuda.set_device(named),
    ):
        with pytest.raises(RuntimeError, match="invalid device ordinal"):
            ask()


def test_a_tensor_that_is_there_is_not_copied() -> None:
    x = torch.ones(3, device="cuda")
    assert x.cuda() is x
    assert x.to("cuda:0", torch.float32) is x
    assert x.to("cuda", copy=True) is not x
    host = x.cpu()
    assert host is not x
    assert host.cpu() is host
    assert x.to(x) is x


def test_a_move_to_the_host_is_a_copy() -> None:
    x = torch.ones(3, device="cuda")
    host = x.cpu()
    x.zero_()
    assert host.tolist() == [1, 1, 1]


def test_a_late_copy_to_the_host_is_pinned() -> None:
    x = torch.ones(3, device="cuda")
    assert x.to("cpu", non_blocking=True).is_pinned()
    assert not x.to("cpu").is_pinned()
    assert not x.cpu().is_pinned()


def test_gradients_go_back_to_where_tensors_came_from() -> None:
    host = torch.randn(3, requires_grad=True)
    (host.cuda() * host.to("cuda")).sum().backward()
    device = torch.randn(3, device="cuda", requires_grad=True)
    (device.cpu() * 2).double().sum().backward()
    there_and_back = torch.randn(3, requires_grad=True)
    there_and_back.cuda().cpu().sum().backward()
    assert host.grad is not None
    assert device.grad is not None
    assert there_and_back.grad is not None
    assert host.grad.is_cpu
    assert device.grad.is_cuda
    assert there_and_back.grad.is_cpu
    torch.testing.assert_close(host.grad, 2 * host.detach())


def test_gradients_go_back_through_copies_into_a_tensor() -> None:
    host = torch.randn(3, requires_grad=True)
    sink = torch.zeros(3, device="cuda")
    sink.copy_(host)
    sink.square().sum().backward()
    assert host.grad is not None
    assert host.grad.is_cpu
    torch.testing.assert_close(host.grad, 2 * host.detach())


def test_a_model_that_was_used_on_the_host_learns_there() -> None:
    model = nn.Linear(3, 3)
    model(torch.ones(2, 3)).cuda().sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    assert all(
        parameter.grad.is_cpu for parameter in model.parameters() if parameter.grad is not None
    )


def test_a_model_moves_with_its_parameters_in_place() -> None:
    model = nn.BatchNorm1d(2)
    before = [id(parameter) for parameter in model.parameters()]
    model.cuda()
    assert all(tensor.is_cuda for tensor in model.state_dict().values())
    model.cpu()
    assert [id(parameter) for parameter in model.parameters()] == before
    assert not any(tensor.is_cuda for tensor in model.state_dict().values())
    model.to(torch.ones(1, device="cuda"))
    assert model.weight.is_cuda
    model.to(device="cuda", dtype=torch.bfloat16)
    assert model.weight.dtype == torch.bfloat16


@pytest.mark.filterwarnings("ignore:Lazy modules:UserWarning")
def test_lazy_modules_come_to_be_where_they_were_moved() -> None:
    model = nn.Sequential(nn.LazyConv2d(4, 3), nn.Flatten(), nn.LazyLinear(2)).cuda()
    y = model(torch.randn(2, 3, 5, 5, device="cuda"))
    y.sum().backward()
    assert y.is_cuda
    assert all(parameter.is_cuda for parameter in model.parameters())


def test_loading_a_state_keeps_the_place() -> None:
    model = nn.Linear(2, 2).cuda()
    model.load_state_dict({name: tensor.cpu() for name, tensor in model.state_dict().items()})
    assert model.weight.is_cuda
    other = nn.Linear(2, 2)
    other.load_state_dict(model.state_dict())
    assert other.weight.is_cpu
    assert torch.equal(other.weight, model.weight.cpu())


def test_to_meta_and_back() -> None:
    assert torch.ones(2, device="cuda").to("meta").is_meta
    assert torch.empty_like(torch.empty(2, device="meta"), device="cuda").is_cuda


@settings(
    deadline=None,
    max_examples=draws.count(60),
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(data=st.data())
def test_any_order_of_moves_keeps_the_values(device: Emulation, data: st.DataObject) -> None:
    shape = data.draw(st.lists(st.integers(0, 3), max_size=3))
    x = torch.arange(int(torch.Size(shape).numel()), dtype=torch.float32).reshape(shape)
    expected, place = x.tolist(), "cpu"
    moves = st.sampled_from(["cuda", "cpu", "view", "late", "float64", "same"])
    for move in data.draw(st.lists(moves, max_size=6)):
        if move in ("cuda", "cpu"):
            x, place = x.to(move), move
        elif move == "late":
            place = "cpu" if place == "cuda" else "cuda"
            x = x.to(place, non_blocking=True)
        elif move == "float64":
            x = x.to(torch.float64)
        elif move == "view":
            x = x.view(shape)
        assert x.device.type == place
    assert x.tolist() == expected
