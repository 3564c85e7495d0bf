from __future__ import annotations

import copy
import pickle
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

pytestmark = pytest.mark.usefixtures("device")


def test_what_a_tensor_says_of_its_device() -> None:
    x, host = torch.ones(2, device="cuda"), torch.ones(2)
    assert x.device == torch.device("cuda", 0)
    assert str(x.device) == "cuda:0"
    assert (x.is_cuda, x.is_cpu, x.get_device(), torch.get_device(x)) == (True, False, 0, 0)
    assert (host.is_cuda, host.is_cpu, host.get_device(), torch.get_device(host)) == (
        *(False, True),
        *(-1, -1),
    )
    assert x.data.is_cuda
    assert x.detach().sum().is_cuda
    assert x.untyped_storage().is_cuda
    assert x.untyped_storage().device == torch.device("cuda:0")


def test_what_a_tensor_prints() -> None:
    x = torch.arange(3.0, device="cuda")
    assert repr(x) == "tensor([0., 1., 2.], device='cuda:0')"
    assert "device='cuda:0'" in str(nn.Parameter(x))
    assert f"{x[1]:.3f}" == "1.000"
    assert str(x.cpu()) == "tensor([0., 1., 2.])"


@pytest.mark.parametrize("convert", [lambda x: x.numpy(), np.asarray, lambda x: x.__array__()])
def test_numpy_cannot_take_it(convert: Any) -> None:
    with pytest.raises(TypeError, match="can't convert cuda:0 device type tensor to numpy"):
        convert(torch.ones(2, device="cuda"))


def test_numpy_can_be_forced() -> None:
    x = torch.ones(2, device="cuda", requires_grad=True)
    assert x.numpy(force=True).tolist() == [1, 1]


def test_types_by_name() -> None:
    x = torch.ones(2, device="cuda")
    assert x.type() == "torch.cuda.FloatTensor"
    assert x.cpu().type() == "torch.FloatTensor"
    doubled = x.type("torch.cuda.DoubleTensor")
    assert (doubled.is_cuda, doubled.dtype) == (True, torch.float64)
    assert x.type(torch.float16).is_cuda
    assert not x.type("torch.FloatTensor").is_cuda
    assert not x.type(torch.LongTensor).is_cuda
    assert x.type(torch.cuda.LongTensor).is_cuda
    assert not x.type_as(torch.ones(1)).is_cuda
    assert torch.ones(1).type_as(x).is_cuda


def test_copies_lie_where_their_source_does() -> None:
    x = torch.ones(3, device="cuda")
    deep = copy.deepcopy([x, x[:2]])
    assert all(tensor.is_cuda for tensor in deep)
    assert deep[0].data_ptr() == deep[1].data_ptr() != x.data_ptr()
    assert copy.copy(x).is_cuda
    assert pickle.loads(pickle.dumps(x)).is_cuda
    model = copy.deepcopy(nn.Linear(2, 2).cuda())
    assert isinstance(model.weight, nn.Parameter)
    assert model.weight.is_cuda
    assert pickle.loads(pickle.dumps(model)).weight.is_cuda


def test_data_that_is_assigned() -> None:
    model = nn.Linear(2, 2)
    model.weight.data = model.weight.data.cuda()
    assert model.weight.is_cuda
    model.weight.data = model.weight.data.cpu()
    assert not model.weight.is_cuda
    x = torch.zeros(2, device="cuda")
    x.set_(torch.ones(4, device="cuda"))
    assert x.is_cuda
    assert torch.empty(0, device="cuda").resize_(5).is_cuda


def test_storages() -> None:
    x = torch.tensor([1.0, 2.0, 3.0], device="cuda")
    storage = x.untyped_storage()
    host = storage.cpu()
    assert not host.is_cuda
    assert host.cuda().is_cuda
    assert storage.clone().is_cuda
    assert storage.cuda() is storage
    assert torch.empty(0).set_(host).numpy().tolist() == [1, 2, 3]
    storage.resize_(0)
    storage.resize_(12)
    assert x.is_cuda


def test_dlpack_within_torch_keeps_the_device() -> None:
    x = torch.randn(3, device="cuda")
    assert tuple(map(int, x.__dlpack_device__())) == (2, 0)
    for taken in (torch.from_dlpack(x), torch.utils.dlpack.from_dlpack(x[1:].clone())):
        assert taken.is_cuda
    again = torch.from_dlpack(torch.utils.dlpack.to_dlpack(x))
    assert again.is_cuda
    again.zero_()
    assert not x.any()
    assert torch.from_dlpack(torch.ones(2)).is_cpu


def test_dlpack_out_of_torch_is_refused() -> None:
    with pytest.raises((RuntimeError, BufferError)):
        np.from_dlpack(torch.ones(2, device="cuda"))
    assert np.from_dlpack(torch.ones(2)).tolist() == [1, 1]


def test_pinned_memory() -> None:
    x = torch.ones(3).pin_memory()
    assert x.is_pinned()
    assert x[1:].is_pinned()
    assert x.pin_memory() is x
    assert not x.clone().is_pinned()
    assert not x.cuda(non_blocking=True).is_pinned()
    with pytest.raises(RuntimeError, match="only dense CPU tensors can be pinned"):
        torch.ones(2, device="cuda").pin_memory()


def test_memory_of_the_device_is_shared_by_nature() -> None:
    assert torch.ones(2, device="cuda").is_shared()
    assert not torch.ones(2).is_shared()


def test_a_gradient_lies_where_its_tensor_does() -> None:
    x = nn.Parameter(torch.ones(3, device="cuda"))
    with pytest.raises(RuntimeError, match="assigned grad has data located on a different device"):
        x.grad = torch.ones(3)
    x.grad = torch.ones(3, device="cuda")
    assert x.grad.is_cuda
    x.grad = None
    assert x.grad is None
    del x.grad
    host = nn.Parameter(torch.ones(3))
    host.grad = torch.ones(3)
    with pytest.raises(RuntimeError, match="different device"):
        host.grad = torch.ones(3, device="cuda")


def test_a_number_of_the_host_learns_on_the_host() -> None:
    scale = nn.Parameter(torch.tensor(2.0))
    for expected in (3.0, 6.0):
        (scale * torch.ones(3, device="cuda")).sum().backward()
        assert scale.grad is not None
        assert scale.grad.is_cpu
        assert scale.grad.item() == expected
    torch.optim.SGD([scale], 0.1).step()
    assert scale.is_cpu


class Own(torch.Tensor):
    """A class of one's own."""


class Watching(torch.Tensor):
    """One that sees what is called."""

    seen: list[str] = []

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        cls.seen.append(func.__name__)
        return super().__torch_function__(func, types, args, kwargs or {})


def test_classes_of_ones_own_move_as_they_are() -> None:
    x = torch.randn(3).as_subclass(Own)
    moved = x.cuda()
    assert type(moved) is Own
    assert moved.is_cuda
    assert (moved * 2).is_cuda
    assert type(moved.cpu()) is type(moved.to("cpu")) is Own


def test_classes_of_ones_own_see_the_move() -> None:
    Watching.seen.clear()
    moved = torch.randn(3).as_subclass(Watching).to("cuda").type(torch.float64)
    assert {"to", "type"} <= set(Watching.seen)
    assert type(moved) is Watching
    assert moved.is_cuda
