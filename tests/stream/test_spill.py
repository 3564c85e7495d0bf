"""Spilling: back bit for bit, sharing kept, and nothing lost where there is no room."""

import errno
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from torchtrim.errors import UsageError
from torchtrim.stream import (
    FileSpill,
    HostSpill,
    MemoryExhausted,
    OverBudget,
    Spill,
    SpillFailed,
    StateStore,
    Watermarks,
    pinned,
    window,
)

DTYPES = [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64]


def bits(value: torch.Tensor) -> bytes:
    return bytes(value.contiguous().flatten().view(torch.uint8).tolist())


@pytest.fixture(params=["host", "file"])
def spill(request: pytest.FixtureRequest, tmp_path: Path) -> Spill:
    return HostSpill() if request.param == "host" else FileSpill(tmp_path)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=25)
@given(st.sampled_from(DTYPES), st.integers(1, 6), st.booleans(), st.integers(0, 2**31))
def test_what_returns_is_what_went(
    spill: Spill, dtype: torch.dtype, rows: int, turned: bool, seed: int
) -> None:
    made = torch.Generator().manual_seed(seed)
    raw = torch.randint(0, 2, (rows, 8), generator=made, dtype=torch.uint8)
    batch = raw.to(dtype)
    views = {frame: batch[frame : frame + 1].T if turned else batch[frame] for frame in range(rows)}
    store = StateStore({"memory": window(99)}, budget=1, spill=spill, compact=False)
    for frame, view in views.items():
        store.adopt(("memory", frame), {"x": {"y": [view, frame]}}, "x")
    with store.step(0):
        pass
    assert store.bytes == 0
    assert store.spilled_bytes == batch.untyped_storage().nbytes()
    back = store["memory", rows - 1]["y"][0]
    assert store.bytes == batch.untyped_storage().nbytes()
    assert store.spilled_bytes == 0
    assert bits(back) == bits(views[rows - 1])
    assert back.stride() == views[rows - 1].stride()
    assert bits(store["memory", 0]["y"][0]) == bits(views[0])
    store.reset()


def test_nan_payloads_survive(spill: Spill) -> None:
    odd = torch.tensor([0x7FC12345, -1], dtype=torch.int32).view(torch.float32)
    want = bits(odd)
    store = StateStore({"a": window(9)}, budget=8, spill=spill)
    store["a", 0] = odd
    store["a", 1] = torch.zeros(2)
    assert store.spilled_bytes == 8
    assert bits(store["a", 0]) == want


def test_a_spilled_entry_is_there_and_its_end_drops_the_bytes(spill: Spill) -> None:
    store = StateStore({"a": window(1)}, budget=8, spill=spill)
    for frame in range(6):
        with store.step(frame):
            store["a", frame] = torch.full((2,), float(frame))
        assert (store.bytes, store.spilled_bytes) == (8, 8 if frame else 0)
    assert list(store) == [("a", 4), ("a", 5)]
    assert store["a", 4].tolist() == [4.0, 4.0]
    store.reset()
    assert (store.bytes, store.spilled_bytes) == (0, 0)


def test_writing_over_what_is_spilled(spill: Spill) -> None:
    store = StateStore({"a": window(9)}, budget=8, spill=spill)
    store["a", 0], store["a", 1] = torch.zeros(2), torch.ones(2)
    store["a", 0] = torch.full((2,), 7.0)
    assert store["a", 0].tolist() == [7.0, 7.0]
    assert store["a", 1].tolist() == [1.0, 1.0]


def test_what_shares_a_storage_with_something_pinned_stays(spill: Spill) -> None:
    batch = torch.zeros(2, 2)
    store = StateStore({"a": window(9), "p": pinned()}, budget=24, spill=spill, compact=False)
    store["p", 0], store["a", 0] = batch[0], batch[1]
    store["a", 1] = torch.ones(2)
    store["a", 2] = torch.ones(2)
    assert store.spilled_bytes == 8
    assert store["a", 0].untyped_storage().data_ptr() == batch.untyped_storage().data_ptr()


@pytest.mark.parametrize("make", [lambda _: HostSpill(12), lambda path: FileSpill(path, 12)])
def test_no_more_than_is_allowed(make: Any, tmp_path: Path) -> None:
    store = StateStore({"a": window(9)}, budget=8, spill=make(tmp_path))
    store["a", 0], store["a", 1] = torch.zeros(2), torch.ones(2)
    with pytest.raises(SpillFailed, match=r"Nothing was lost.*Raise the limit"):
        store["a", 2] = torch.ones(2)
    assert {key: store[key].tolist() for key in store} == {
        ("a", 0): [0.0, 0.0],
        ("a", 1): [1.0, 1.0],
    }


def test_a_full_disk_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = StateStore({"a": window(9)}, budget=8, spill=FileSpill(tmp_path))
    store["a", 0] = torch.zeros(2)

    def full(*_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "posix_fallocate", full)
        with pytest.raises(SpillFailed, match="No space left on device"):
            store["a", 1] = torch.ones(2)
    assert list(store) == [("a", 0)]
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]
    store["a", 1] = torch.ones(2)
    assert store.spilled_bytes == 8


def test_space_is_taken_where_the_system_cannot_reserve_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(os, "posix_fallocate")
    spill = FileSpill(tmp_path)
    data = torch.arange(200, dtype=torch.uint8)
    assert torch.equal(spill.get(spill.put(data)), data)


def test_closing_removes_the_files(tmp_path: Path) -> None:
    spill = FileSpill(tmp_path)
    spill.get(spill.put(torch.empty(0, dtype=torch.uint8)))
    spill.put(torch.zeros(9, dtype=torch.uint8))
    assert spill.bytes == 9
    spill.close()
    assert not list(tmp_path.iterdir())


def test_a_directory_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="not a directory"):
        FileSpill(tmp_path / "absent")


def test_what_is_pinned_is_spilled_last_and_never_lost(spill: Spill) -> None:
    store = StateStore({"a": window(9), "p": pinned()}, budget=16, spill=spill)
    for frame in range(3):
        store["p", frame] = torch.full((2,), float(frame))
    assert (store.bytes, store.spilled_bytes) == (16, 8)
    store["a", 3] = torch.zeros(2)
    store["a", 4] = torch.zeros(2)
    assert store.recall(("p", 0))
    assert [store["p", frame].tolist() for frame in range(3)] == [[0.0] * 2, [1.0] * 2, [2.0] * 2]
    with pytest.raises(OverBudget, match="Raise the budget: a single entry"):
        store["p", 9] = torch.zeros(5)


def test_a_spill_that_is_set_is_not_advised(spill: Spill) -> None:
    store = StateStore({"p": pinned()}, spill=spill)
    store["p", 0] = torch.zeros(100)
    marks = Watermarks(store, 1000, measure=lambda: 960)
    with pytest.raises(MemoryExhausted, match="Everything that can be spilled is"):
        marks.check()
    assert store.spilled_bytes == 400
