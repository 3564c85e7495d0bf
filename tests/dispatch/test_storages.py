from __future__ import annotations

import gc
from typing import Any

import pytest
import torch

from torchtrim.dispatch.storages import Storages, allocated_bytes, parts_of, reachable_tensors


def test_a_storage_is_seen_once_and_dies_once() -> None:
    storages = Storages()
    tensor = torch.ones(10)
    assert storages.see(tensor, 3) == storages.see(tensor.view(2, 5)[1:], 7) == 0
    assert (storages.lives[0].birth, storages.live_bytes) == (3, 40)
    view = tensor[2:]
    storages.clock = 9
    del tensor
    assert (storages.lives[0].death, storages.live_bytes) == (-1, 40)
    storages.clock = 12
    del view
    assert (storages.lives[0].death, storages.live_bytes) == (12, 0)


def test_storages_die_in_the_order_in_which_they_are_let_go() -> None:
    storages = Storages()
    tensors = [torch.ones(size) for size in (1, 2, 3)]
    for tensor in tensors:
        storages.see(tensor, 0)
    del tensor
    for clock, index in enumerate((1, 2, 0), 1):
        storages.clock = clock
        tensors[index] = torch.empty(0)
    assert [life.death for life in storages.lives] == [3, 1, 2]


def test_an_address_that_is_used_again_is_another_storage() -> None:
    storages = Storages()
    keys = set()
    for number in range(50):
        tensor = torch.ones(number + 1)
        keys.add(tensor.untyped_storage()._cdata)
        assert storages.see(tensor, number) == number
        storages.clock = number + 1
        del tensor
    assert len(keys) < 50
    assert [life.death for life in storages.lives] == list(range(1, 51))
    assert storages.live_bytes == 0


def test_a_storage_that_is_resized_ends_and_another_begins() -> None:
    storages = Storages()
    tensor = torch.ones(10)
    number = storages.see(tensor, -1)
    storages.lives[number].kind, storages.lives[number].name = "parameter", "weight"
    storages.clock = 5
    tensor.resize_(20)
    grown = storages.settle(tensor)
    assert grown != number
    assert [(s.bytes, s.birth, s.death) for s in storages.lives] == [(40, -1, 5), (80, 4, -1)]
    assert (storages.lives[grown].kind, storages.lives[grown].name) == ("parameter", "weight")
    assert storages.live_bytes == 80
    storages.clock = 6
    del tensor
    assert storages.live_bytes == 0


def test_the_peak_is_what_was_alive_when_it_was_noted() -> None:
    storages = Storages()
    first = torch.ones(10)
    storages.see(first, 0)
    storages.note_peak()
    del first
    second = torch.ones(5)
    storages.see(second, 0)
    storages.note_peak()
    assert (storages.live_bytes, storages.peak_bytes) == (20, 40)


def test_what_is_forgotten_stays_alive() -> None:
    storages = Storages()
    tensor = torch.ones(3)
    storages.see(tensor, 0)
    storages.forget()
    del tensor
    assert storages.lives[0].death == -1


def test_a_meta_tensor_has_no_bytes() -> None:
    storages = Storages()
    storages.see(torch.empty(1 << 30, device="meta"), 0)
    assert (storages.lives[0].bytes, storages.lives[0].device) == (0, "meta")


def test_what_an_allocator_gives() -> None:
    assert [allocated_bytes(size, "cuda:0") for size in (0, 1, 512, 513)] == [0, 512, 512, 1024]
    assert [allocated_bytes(size, "cpu") for size in (0, 1, 513)] == [0, 1, 513]
    assert allocated_bytes(513, "meta") == 0


def test_what_dies_inside_backward_is_released_by_it() -> None:
    storages = Storages()
    weight = torch.ones(4, requires_grad=True)
    saved = weight.exp()
    storages.see(saved, 0)
    loss = saved.sum()
    storages.see(loss, 1)
    del saved
    loss.backward()
    del loss
    assert [life.released for life in storages.lives] == [True, False]


@pytest.mark.parametrize(
    ("layout", "count"),
    [
        (torch.sparse_coo, 2),
        (torch.sparse_csr, 3),
        (torch.sparse_csc, 3),
        (torch.sparse_bsr, 3),
        (torch.sparse_bsc, 3),
    ],
)
@pytest.mark.filterwarnings("ignore:Sparse")
def test_the_parts_of_a_sparse_tensor(layout: torch.layout, count: int) -> None:
    blocks = {"blocksize": (2, 2)} if layout in (torch.sparse_bsr, torch.sparse_bsc) else {}
    sparse = torch.eye(4).to_sparse(layout=layout, **blocks)
    parts = list(parts_of(sparse))
    assert len(parts) == count
    storages = Storages()
    numbers = [storages.see(part, 0) for part in parts]
    assert min(numbers) >= 0
    del parts
    assert all(life.death == -1 for life in storages.lives)
    assert [storages.number(part) for part in parts_of(sparse)] == numbers


class Pair(torch.Tensor):
    """A tensor of two."""

    left: torch.Tensor
    right: torch.Tensor

    @staticmethod
    def __new__(cls, left: torch.Tensor, right: torch.Tensor) -> Any:
        pair = torch.Tensor._make_wrapper_subclass(cls, left.shape, dtype=left.dtype)
        pair.left, pair.right = left, right
        return pair

    def __tensor_flatten__(self) -> Any:
        return ["left", "right"], None

    @staticmethod
    def __tensor_unflatten__(inner: Any, meta: Any, size: Any, stride: Any) -> Any:
        return Pair(inner["left"], inner["right"])

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise NotImplementedError


def test_the_parts_of_a_wrapper() -> None:
    left, right = torch.ones(3), torch.zeros(3)
    assert [
        part is one for part, one in zip(parts_of(Pair(left, right)), (left, right), strict=True)
    ]


def test_a_lazy_parameter_has_no_parts() -> None:
    lazy = torch.nn.LazyLinear(3).weight
    assert list(parts_of(lazy)) == []
    assert not any(tensor is lazy for tensor in reachable_tensors())


def test_a_gradient_is_reached_through_its_leaf() -> None:
    leaf = torch.ones(3, requires_grad=True)
    (leaf * 2).sum().backward()
    gc.collect()
    found = list(reachable_tensors())
    assert any(tensor is leaf for tensor in found)
    assert any(tensor is leaf.grad for tensor in found)
