from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

from torchtrim.capture.recording import record_call
from torchtrim.dispatch.storages import (
    PythonReferences,
    Storages,
    allocated_bytes,
    counts_tell,
    is_kept,
    parts_of,
    reachable_bytes,
    reachable_tensors,
)
from torchtrim.records.profile import Profile, Storage
from torchtrim.step.from_profile import step_of


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


def test_views_of_an_array_are_no_memory_of_torch() -> None:
    """Samples of a column-major table, as pandas gives them, each span nearly all of it."""
    table = numpy.zeros((7, 100)).T
    samples = [torch.as_tensor(table[start : start + 5]) for start in range(20)]
    storages, host = Storages(), Storages("cuda")
    for sample in samples:
        storages.see(sample, 3)
        host.see(sample, 3)
    assert storages.live_bytes == 0
    assert all(life.bytes > 0 for life in host.lives)
    shared = torch.ones(10).share_memory_()
    storages.see(shared, 4)
    assert storages.live_bytes == 40


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


tells = pytest.mark.skipif(not counts_tell(), reason="this torch counts references in another way")


def recorded(function: Callable[[], Any]) -> Profile:
    return record_call(function, device="cpu")


def made_by(profile: Profile, name: str) -> Storage:
    index = next(i for i, op in enumerate(profile.operators) if op.name == name)
    return profile.storages[profile.operators[index].outputs[0].storage]


def place_of(profile: Profile, name: str) -> int:
    return next(i for i, op in enumerate(profile.operators) if op.name == name)


WEIGHT = torch.full((64,), 0.5, requires_grad=True)


def kept_as_local() -> torch.Tensor:
    made = WEIGHT.exp()
    return (made.sin().cos() * 2).sum()


def named_anew() -> torch.Tensor:
    x = WEIGHT.exp()
    x = x.sin()
    x = x.cos()
    return (x * 2).sum()


@tells
def test_a_local_is_kept_until_its_function_ends() -> None:
    def step() -> None:
        kept_as_local().backward()

    profile = recorded(step)
    made = made_by(profile, "aten::exp.default")
    assert made.kept == place_of(profile, "aten::sum.default") + 1
    assert made.death > made.kept


@tells
def test_a_name_given_to_another_tensor_keeps_the_first_no_longer() -> None:
    profile = recorded(lambda: named_anew().backward())
    assert made_by(profile, "aten::exp.default").kept == place_of(profile, "aten::cos.default")


@tells
def test_a_list_keeps_to_the_end() -> None:
    logged: list[torch.Tensor] = []

    def step() -> None:
        logged.append(WEIGHT.exp())
        logged[0].sin().sum().backward()

    profile = recorded(step)
    assert made_by(profile, "aten::exp.default").kept == len(profile.operators)


@tells
def test_a_view_keeps_its_storage() -> None:
    def step() -> None:
        view = WEIGHT.exp().view(8, 8)
        view.sin().cos().sum().backward()
        del view

    profile = recorded(step)
    assert made_by(profile, "aten::exp.default").kept == len(profile.operators)


@tells
def test_without_what_autograd_saved_a_local_is_still_there() -> None:
    profile = recorded(lambda: kept_as_local().backward())
    made = profile.operators[place_of(profile, "aten::exp.default")].outputs[0].storage
    rest, *saved = step_of(profile).tensors[made].holds
    assert saved
    assert rest.until == place_of(profile, "aten::sum.default") + 1


def test_a_torch_that_counts_otherwise_tells_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torchtrim.dispatch.storages.counts_tell", lambda: False)
    profile = recorded(lambda: kept_as_local().backward())
    assert {storage.kept for storage in profile.storages} == {-1}


@tells
def test_many_objects_are_looked_at_in_turns() -> None:
    gone: list[int] = []
    kept = PythonReferences(gone.append)
    tensors = [torch.zeros(1) for _ in range(100)]
    for number, tensor in enumerate(tensors):
        kept.add(tensor, number)
    del tensor
    tensors.clear()
    kept.sweep(1)
    assert not gone
    kept.sweep(4)
    assert sorted(gone) == list(range(100))


@tells
def test_an_object_that_died_is_not_kept() -> None:
    tensor = torch.zeros(1)
    reference = weakref.ref(tensor)
    assert is_kept(reference)
    del tensor
    assert not is_kept(reference)


def test_hooks_of_the_caller_do_not_see_how_torch_counts() -> None:
    seen: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(seen.append, lambda _: torch.zeros(1)):
        counts_tell.__wrapped__()
    assert seen == []


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
def test_reachable_bytes_are_of_the_parts_of_tensors_and_of_no_files(tmp_path: Path) -> None:
    gc.collect()
    before = reachable_bytes()
    sparse = torch.sparse_coo_tensor(torch.arange(1000)[None], torch.ones(1000), (9000,))
    assert reachable_bytes() == before + 12 * 1000
    (tmp_path / "numbers").write_bytes(bytes(4096))
    mapped = torch.from_file(str(tmp_path / "numbers"), shared=True, size=1024)
    assert reachable_bytes() == before + 12 * 1000
    del sparse, mapped
