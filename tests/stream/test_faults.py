"""What goes wrong in the middle leaves the state whole, or says what was lost: nothing."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import torch

from torchtrim.stream import (
    FileSpill,
    HostSpill,
    SpillFailed,
    StateStore,
    held_bytes,
    pinned,
    storages,
    until_read,
    volatile,
    window,
)


def whole(store: StateStore) -> bool:
    held = [store[key] for key in store]
    return store.bytes == held_bytes(held)


class Flaky(HostSpill):
    """Works a few times, then is full."""

    def __init__(self, times: int) -> None:
        super().__init__()
        self.times = times

    def put(self, data: torch.Tensor) -> torch.Tensor:
        if self.times == 0:
            raise SpillFailed("full")
        self.times -= 1
        return super().put(data)


def test_no_memory_for_the_copy_that_compaction_wants(monkeypatch: pytest.MonkeyPatch) -> None:
    store = StateStore({"a": pinned()})
    batch = torch.arange(8.0).reshape(4, 2)
    for row in range(4):
        store["a", (row, 0)] = batch[row]

    def full(self: Any, tensor: torch.Tensor) -> torch.Tensor:
        raise torch.OutOfMemoryError("out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(storages.Copies, "own", full)
        del store["a", (0, 0)]
    assert whole(store)
    assert store.bytes == 32
    del store["a", (1, 0)]
    assert store.bytes == 16
    assert store["a", (3, 0)].tolist() == [6.0, 7.0]


def test_a_spill_that_fails_half_way_through_one_entry() -> None:
    store = StateStore({"a": window(9)}, spill=Flaky(1))
    store["a", 0] = {"x": torch.ones(2), "y": [torch.full((3,), 2.0)]}
    with pytest.raises(SpillFailed):
        store.relieve(1000)
    assert (store.bytes, store.spilled_bytes) == (12, 8)
    back = store["a", 0]
    assert (back["x"].tolist(), back["y"][0].tolist()) == ([1.0, 1.0], [2.0, 2.0, 2.0])
    assert whole(store)


def test_a_spill_that_fails_after_some_entries() -> None:
    store = StateStore({"a": window(9)}, spill=Flaky(2))
    for frame in range(5):
        store["a", frame] = torch.full((2,), float(frame))
    with pytest.raises(SpillFailed):
        store.relieve(1000)
    assert [float(store["a", frame][0]) for frame in range(5)] == [0.0, 1.0, 2.0, 3.0, 4.0]
    assert whole(store)


def test_a_file_that_vanished_is_an_error_and_the_rest_is_there(tmp_path: Any) -> None:
    store = StateStore({"a": window(9)}, budget=8, spill=FileSpill(tmp_path))
    store["a", 0], store["a", 1] = torch.ones(2), torch.zeros(2)
    next(path for path in tmp_path.rglob("*") if path.is_file()).unlink()
    with pytest.raises(SpillFailed, match="'a' of frame 0"):
        store["a", 0]
    assert store["a", 1].tolist() == [0.0, 0.0]


def test_entries_that_are_gone_are_not_spilled_again() -> None:
    store = StateStore({"a": window(1), "b": volatile()}, spill=HostSpill())
    with store.step(0):
        store["a", 0] = torch.zeros(2)
        store["b", 0] = torch.zeros(2)
        store.relieve(1000)
        assert store.spilled_bytes == 16
    assert store.spilled_bytes == 8
    for frame in (1, 2):
        store.advance(frame)
    store.end()
    assert (store.spilled_bytes, len(store)) == (0, 0)


def test_what_is_read_away_while_it_is_spilled() -> None:
    store = StateStore({"a": until_read(1)}, spill=HostSpill())
    store["a", 0] = torch.ones(2)
    store.relieve(8)
    assert store["a", 0].tolist() == [1.0, 1.0]
    assert (store.bytes, store.spilled_bytes) == (0, 0)


def test_two_tasks_with_a_stream_each() -> None:
    first = StateStore({"a": window(2)})

    async def run(store: StateStore, shift: int) -> list[float]:
        seen = []
        for frame in range(20):
            with store.step(frame):
                store["a", frame] = torch.tensor([float(frame + shift)])
                await asyncio.sleep(0)
                seen.append(float(store["a", max(0, frame - 2)][0]))
        return seen

    async def both() -> list[list[float]]:
        return await asyncio.gather(run(first, 0), run(first.stream(), 100))

    one, other = asyncio.run(both())
    assert other == [value + 100 for value in one]


def test_numbers_that_come_twice() -> None:
    store = StateStore({"a": window(2)})
    for frame in (0, 1, 1, 2, 2, 2, 3):
        with store.step(frame):
            store["a", frame] = torch.tensor([float(frame)])
    assert sorted(key[1] for key in store) == [1, 2, 3]
    assert store.bytes == 12
