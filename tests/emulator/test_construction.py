from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from torchtrim.capture.recording import record_call

pytestmark = pytest.mark.usefixtures("device")

SPARSE = pytest.mark.filterwarnings("ignore:Sparse:UserWarning")


def rows(function: Any) -> list[str]:
    """The waits and races of a call."""
    return [sync.row for sync in record_call(function, device="emulated").syncs]


@pytest.mark.parametrize("data", [3, [1.0, 2.0], [[1], [2]], np.ones(2), (True, False)])
def test_data_is_uploaded_with_its_values_and_type(data: Any) -> None:
    made, expected = torch.tensor(data, device="cuda"), torch.tensor(data)
    assert made.is_cuda
    assert made.dtype == expected.dtype
    assert torch.equal(made.cpu(), expected)


def test_an_upload_waits_once() -> None:
    assert rows(lambda: torch.tensor([1.0, 2.0], device="cuda")) == ["new-tensor"]
    assert rows(lambda: torch.as_tensor(np.ones(2), device="cuda")) == ["new-tensor"]
    assert rows(lambda: torch.tensor([1.0, 2.0])) == []
    assert rows(lambda: torch.zeros(2, device="cuda")) == []


def test_options_of_data() -> None:
    x = torch.tensor([1, 2], dtype=torch.float64, device="cuda", requires_grad=True)
    assert x.requires_grad
    assert x.is_leaf
    assert x.dtype == torch.float64
    assert torch.tensor([1.0], pin_memory=True).is_pinned()


@pytest.mark.filterwarnings("ignore:To copy construct:UserWarning")
def test_a_tensor_of_a_tensor_lies_where_that_does() -> None:
    x = torch.randn(3, device="cuda")
    copied = torch.tensor(x)
    assert copied.is_cuda
    assert copied.data_ptr() != x.data_ptr()
    assert torch.tensor(x, device="cpu").is_cpu
    assert torch.tensor(x.cpu(), device="cuda").is_cuda
    assert torch.as_tensor(x) is x
    assert torch.as_tensor(x, device="cpu").is_cpu
    assert torch.as_tensor(x, dtype=torch.float64).is_cuda
    assert torch.asarray(x).is_cuda


def test_a_list_of_tensors_is_read_one_by_one() -> None:
    x = torch.randn(3, device="cuda")
    assert torch.tensor([x[0], x[1]]).is_cpu
    assert rows(lambda: torch.tensor([x[0], x[1]])) == ["item"] * 2
    assert rows(lambda: torch.tensor([[x[0]], [x[1]]], device="cuda")) == ["item"] * 2 + [
        "new-tensor"
    ]


def test_new_tensors_like_another() -> None:
    x = torch.zeros(2, device="cuda")
    assert x.new_tensor([1.0]).is_cuda
    assert x.new_tensor([1.0], device="cpu").is_cpu
    assert torch.zeros(2).new_tensor([1.0], device="cuda").is_cuda
    assert x.new_zeros(2).is_cuda
    assert x.new_empty(2, device="cpu").is_cpu
    assert x.new(2).is_cuda
    assert torch.zeros_like(x, device="cpu").is_cpu
    assert torch.zeros_like(x.cpu(), device="cuda").is_cuda


def test_types_of_the_device() -> None:
    kinds: Any = torch.cuda
    assert kinds.FloatTensor([1, 2]).tolist() == [1, 2]
    assert kinds.FloatTensor(2, 3).shape == (2, 3)
    assert kinds.FloatTensor(torch.Size([2])).shape == (2,)
    assert kinds.FloatTensor().shape == (0,)
    assert kinds.LongTensor(np.array([1])).dtype == torch.int64
    x = kinds.FloatTensor([1.0])
    assert x.is_cuda
    assert isinstance(x, kinds.FloatTensor)
    assert not isinstance(x, kinds.LongTensor)
    assert not isinstance(x.cpu(), kinds.FloatTensor)


@pytest.mark.filterwarnings("ignore:torch.set_default_tensor_type:UserWarning")
@pytest.mark.parametrize("kind", ["torch.cuda.DoubleTensor", "torch.cuda.FloatTensor"])
def test_a_default_type_of_the_device(kind: str) -> None:
    torch.set_default_tensor_type(kind)
    try:
        made = torch.ones(2)
    finally:
        torch.set_default_tensor_type("torch.FloatTensor")
    assert made.is_cuda
    assert made.dtype == (torch.float64 if "Double" in kind else torch.float32)
    assert torch.ones(2).is_cpu


def test_generators_say_where_they_are() -> None:
    device, host = torch.Generator("cuda"), torch.Generator()
    assert device.device == torch.device("cuda:0")
    assert host.device == torch.device("cpu")
    assert isinstance(torch.default_generator, torch.Generator)
    device.manual_seed(1)
    host.manual_seed(1)
    on_device = torch.randn(5, device="cuda", generator=device)
    assert torch.equal(on_device.cpu(), torch.randn(5, generator=host))


@SPARSE
def test_sparse_tensors() -> None:
    made = torch.sparse_coo_tensor([[0, 1]], [1.0, 2.0], (3,), device="cuda", requires_grad=True)
    assert made.is_cuda
    assert made.requires_grad
    parts = torch.sparse_coo_tensor(
        torch.tensor([[0, 1]], device="cuda"), torch.ones(2, device="cuda"), (3,)
    )
    assert parts.is_cuda
    assert not parts.cpu().is_cuda
    assert torch.eye(2, device="cuda").to_sparse().is_cuda


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
def test_nested_tensors() -> None:
    parts = [torch.randn(2, 3), torch.randn(4, 3)]
    nested = torch.nested.nested_tensor(parts, device="cuda")
    assert nested.is_cuda
    model = nn.Linear(3, 3).cuda()
    padded = torch.nested.to_padded_tensor(model(nested), 0.0)
    assert padded.is_cuda
    torch.testing.assert_close(padded[1].cpu(), model.cpu()(parts[1]))


def test_ragged_tensors() -> None:
    """torch makes their wrapper with the device in its place, not by name."""
    parts = [torch.randn(2, 3), torch.randn(4, 3)]
    model = nn.Linear(3, 3)
    expected = [model(part) for part in parts]
    ragged = torch.nested.nested_tensor(parts, layout=torch.jagged, device="cuda")
    assert ragged.is_cuda
    for made, plain in zip(model.cuda()(ragged).unbind(), expected, strict=True):
        assert made.is_cuda
        torch.testing.assert_close(made.cpu(), plain)
