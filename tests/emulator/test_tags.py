from __future__ import annotations

import gc

import torch
from hypothesis import given
from hypothesis import strategies as st

from torchtrim.emulator.device import emulate
from torchtrim.emulator.tags import Tags


def test_a_tag_is_on_the_storage() -> None:
    tags, x = Tags(), torch.zeros(6)
    tags.put(x[2:])
    assert tags.on_device(x)
    assert tags.on_device(x.view(2, 3).t())
    assert tags.on_device(x.detach())
    assert tags.holds(x.untyped_storage())
    assert not tags.on_device(x.clone())


def test_a_tag_goes_with_its_storage() -> None:
    tags, x = Tags(), torch.zeros(6)
    tags.put(x)
    view = x[0]
    del x
    assert tags.on_device(view)
    del view
    assert tags.events == [(0, 24), (0, -1)]
    assert not any(tags.on_device(torch.zeros(6)) for _ in range(5))


def test_a_tag_can_be_taken() -> None:
    tags, x = Tags(), torch.zeros(6)
    tags.take(x)
    tags.put(x)
    tags.take(x[1:])
    assert not tags.on_device(x)
    assert tags.events == [(0, 24), (0, -1)]
    del x
    assert len(tags.events) == 2


def test_it_is_put_once() -> None:
    tags, x = Tags(), torch.zeros(2)
    tags.put(x)
    tags.put(x[:1])
    assert tags.events == [(0, 8)]


def test_a_sparse_tensor_is_where_its_values_are() -> None:
    tags = Tags()
    sparse = torch.eye(2).to_sparse()
    assert not tags.on_device(sparse)
    tags.put(sparse)
    assert tags.on_device(sparse)
    assert tags.on_device(sparse._values())


def test_pinned_memory_is_of_the_host() -> None:
    tags, x = Tags(), torch.zeros(4)
    assert not tags.is_pinned(x)
    tags.pin(x)
    assert tags.is_pinned(x[1:])
    assert not tags.on_device(x)
    del x
    assert not tags.is_pinned(torch.zeros(4))


def test_what_is_open_is_decided_by_putting_it() -> None:
    tags, x = Tags(), torch.zeros(4)
    assert not tags.any_open()
    tags.leave_open(x)
    assert tags.is_open(x[1:])
    assert tags.any_open()
    tags.put(x)
    assert not tags.is_open(x)


def test_a_storage_is_found_by_its_address() -> None:
    tags, x = Tags(), torch.zeros(4)
    assert tags.storage_at(x.data_ptr()) is None
    tags.put(x)
    assert tags.storage_at(x.data_ptr()).data_ptr() == x.data_ptr()


@given(st.lists(st.integers(0, 5), max_size=30))
def test_events_come_in_pairs(choices: list[int]) -> None:
    tags = Tags()
    held: dict[int, torch.Tensor] = {}
    for choice in choices:
        if choice in held:
            del held[choice]
        else:
            held[choice] = torch.zeros(choice + 1)
            tags.put(held[choice])
    gc.collect(0)
    living = {number for number, size in tags.events if size >= 0}
    living -= {number for number, size in tags.events if size < 0}
    assert len(living) == len(held)
    assert all(map(tags.on_device, held.values()))


def test_a_storage_that_is_resized_is_another_allocation() -> None:
    tags, x = Tags(), torch.zeros(6)
    tags.put(x)
    for size in (24, 0, 48):
        x.untyped_storage().resize_(size)
        tags.resized(x.untyped_storage())
    assert tags.events == [(0, 24), (0, -1), (1, 0), (1, -1), (2, 48)]
    assert tags.on_device(x)
    tags.resized(torch.zeros(2).untyped_storage())
    assert len(tags.events) == 5


def test_gradients_are_summed_in_place_where_nothing_else_has_them() -> None:
    with emulate() as emulation:
        x = torch.ones(1000, device="cuda", requires_grad=True)
        y = x * 1.0
        loss = (y.sin() + y.cos()).sum() + y.reshape(10, 100).max(-1)[0].sum()
        emulation.counters.settle()
        before = emulation.counters.allocator.mallocs
        loss.backward()
        made = emulation.counters.settle().mallocs - before
    # One for the loss, zeros for max, three of cos, two of sin, and one of x: none for the two sums.
    assert made == 1 + 1 + 3 + 2 + 1
