"""Watermarks on a memory that is told, on the state's own bytes, and when memory runs out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from torchtrim.errors import Unsupported, UsageError
from torchtrim.stream import (
    FileSpill,
    HostSpill,
    Level,
    MemoryExhausted,
    StateStore,
    UnmanagedMemory,
    Watermarks,
    memory_use,
    pinned,
    volatile,
    window,
)

FRAME = 4 * 100 + 4 * 10
LIVE = 16 * 40 + 400


def stream(watermarks: Watermarks, frames: int) -> list[int]:
    store, sizes = watermarks.stores[0], []
    for frame in range(frames):
        with store.step(frame):
            store["image", frame] = torch.zeros(100)
            store["pointer", frame] = torch.full((10,), float(frame))
        sizes.append(store.bytes)
        watermarks.check()
        near = range(max(0, frame - 15), frame + 1)
        assert all(("pointer", one) in store for one in near)
    return sizes


def test_a_thousand_frames_below_one_and_a_half_live_sets() -> None:
    store = StateStore({"image": volatile(), "pointer": window(15)}, every=0)
    limit = int(1.5 * LIVE)
    marks = Watermarks(store, limit, target=0.7, spill=0.99, pause=2.0, terminate=3.0)
    sizes = stream(marks, 1000)
    assert max(sizes) <= limit + FRAME
    assert marks.highest == max(sizes)
    growing = limit * 0.99 - (LIVE - 400)
    assert 0 < marks.cleanings <= 1000 / (growing // FRAME)


def test_cleaning_has_hysteresis() -> None:
    used = 0
    store = StateStore({"a": volatile()}, every=0)
    marks = Watermarks(store, 100, measure=lambda: used, terminate=9.0, pause=9.0)
    levels = []
    for used in (10, 69, 70, 65, 61, 69):
        store["a", used] = torch.zeros(1)
        levels.append(marks.check())
    assert [level.value for level in levels] == ["fine", "fine", "cleaned", "fine", "fine", "fine"]
    assert marks.cleanings == 1


def test_it_pauses_until_usage_is_below_spill_and_ends_at_the_last() -> None:
    used = 0
    store = StateStore({"a": pinned()})
    store["a", 0] = torch.zeros(100)
    marks = Watermarks(store, 100, measure=lambda: used)
    levels = []
    for amount in (79, 80, 75, 70, 69, 79):
        used = amount
        levels.append(marks.check() is Level.PAUSED)
    del store["a", 0]
    assert levels == [False, True, True, True, False, False]
    used = 95
    with (
        pytest.warns(UnmanagedMemory, match="only 0 of them"),
        pytest.raises(MemoryExhausted, match="Nothing was lost"),
    ):
        marks.check()
    used = 10
    assert marks.wait(0.2, every=0.01)
    used = 85
    with pytest.warns(UnmanagedMemory):
        assert not marks.wait(0.03, every=0.01)


def test_what_it_does_not_own_is_warned_of_once() -> None:
    store = StateStore({"a": window(9)})
    store["a", 0] = torch.zeros(5)
    marks = Watermarks(store, 100, measure=lambda: 75)
    with pytest.warns(UnmanagedMemory, match="75 bytes are in use and only 20"):
        marks.check()
    assert marks.check() is Level.FINE


@pytest.mark.parametrize("make", [lambda _: HostSpill(), FileSpill])
def test_live_state_above_the_limit_is_spilled_and_returns_to_the_bit(
    make: Any, tmp_path: Path
) -> None:
    store = StateStore({"image": volatile(), "pointer": window(15)}, spill=make(tmp_path))
    marks = Watermarks(store, 300, pause=9.0, terminate=9.0)
    made = torch.Generator().manual_seed(0)
    values = {frame: torch.randn(10, generator=made) for frame in range(40)}
    for frame, value in values.items():
        with store.step(frame):
            store["pointer", frame] = value.clone()
        marks.check()
        assert store.bytes <= 300
    assert store.spilled_bytes > 0
    for frame in range(25, 40):
        assert torch.equal(store["pointer", frame], values[frame])


def test_running_out_of_memory_lets_go_and_tries_once_more() -> None:
    store = StateStore({"image": volatile(), "pointer": window(15)}, every=0, spill=HostSpill())
    for frame in range(8):
        with store.step(frame):
            store["image", frame] = torch.zeros(100)
            store["pointer", frame] = torch.full((10,), float(frame))
    marks = Watermarks(store, 10**9)

    def work(frame: int) -> str:
        if store.bytes > 100:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return f"frame {frame}"

    assert marks.guard(work, 8) == "frame 8"
    assert (store.bytes, marks.cleanings) == (0, 1)
    assert [float(store["pointer", frame][0]) for frame in range(8)] == list(map(float, range(8)))

    def never() -> None:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9")

    with pytest.raises(MemoryExhausted, match="ran out again"):
        marks.guard(never)
    with pytest.raises(ZeroDivisionError):
        marks.guard(lambda: 1 / 0)

    def other() -> None:
        raise RuntimeError("shapes do not fit")

    with pytest.raises(RuntimeError, match="shapes do not fit"):
        marks.guard(other)


def test_what_is_in_use_can_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert memory_use.process_bytes() > 10**6
    used, total = memory_use.host_bytes()
    assert 0 < used <= total
    with pytest.raises(Unsupported, match="no memory of its own"):
        memory_use.device_bytes("cpu")
    memory_use.release_caches()
    (tmp_path / "memory.max").write_text("1000\n")
    (tmp_path / "memory.current").write_text("400\n")
    monkeypatch.setattr(memory_use, "_CGROUP", tmp_path)
    assert memory_use.host_bytes() == (400, 1000)
    store = StateStore({"a": volatile()})
    assert Watermarks.of_host(store).limit == 1000
    assert Watermarks.of_process(store, 10**15).check() is Level.FINE
    with pytest.raises(Unsupported):
        Watermarks.of_device(store, "cpu")
    (tmp_path / "memory.max").unlink()
    monkeypatch.setattr(memory_use, "_PROC", tmp_path)
    assert memory_use.process_bytes() > 10**6
    with pytest.raises(Unsupported, match="measure of your own"):
        memory_use.host_bytes()


def test_shares_that_do_not_rise_are_refused() -> None:
    for wrong in ({"target": 0.9}, {"spill": 0.99}, {"pause": 0.1}):
        with pytest.raises(UsageError, match="the shares rise"):
            Watermarks([], 100, **wrong)
    with pytest.raises(UsageError, match="above zero"):
        Watermarks([], 0)
