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
    growth,
    pinned,
    volatile,
    window,
)
from torchtrim.stream.growth import (
    SizeSample,
    adapter_for,
    keeps_growing,
    looks_at,
    per_frame,
    settled,
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
        pytest.warns(UnmanagedMemory, match="holds only 0 of them"),
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
    with pytest.warns(
        UnmanagedMemory, match="75 bytes are in use and the watched state holds only 20"
    ):
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
    assert growth.process_bytes() > 10**6
    used, total = growth.host_bytes()
    assert 0 < used <= total
    with pytest.raises(Unsupported, match="no separate memory"):
        growth.device_bytes("cpu")
    growth.release_caches()
    (tmp_path / "memory.max").write_text("1000\n")
    (tmp_path / "memory.current").write_text("400\n")
    monkeypatch.setattr(growth, "_CGROUP", tmp_path)
    assert growth.host_bytes() == (400, 1000)
    store = StateStore({"a": volatile()})
    assert Watermarks.of_host(store).limit == 1000
    assert Watermarks.of_process(store, 10**15).check() is Level.FINE
    with pytest.raises(Unsupported):
        Watermarks.of_device(store, "cpu")
    (tmp_path / "memory.max").unlink()
    monkeypatch.setattr(growth, "_PROC", tmp_path)
    assert growth.process_bytes() > 10**6
    with pytest.raises(Unsupported, match="your own measure"):
        growth.host_bytes()


def test_shares_that_do_not_rise_are_refused() -> None:
    for wrong in ({"target": 0.9}, {"spill": 0.99}, {"pause": 0.1}):
        with pytest.raises(UsageError, match="fractions with"):
            Watermarks([], 100, **wrong)
    with pytest.raises(UsageError, match="above zero"):
        Watermarks([], 0)


def sampled(size: object, frames: int = 60) -> list[SizeSample]:
    looks = [frame for frame in range(1, frames + 1) if looks_at(frame) or frame == frames]
    return list(settled([SizeSample(frame, size(frame)) for frame in looks]))  # type: ignore[operator]


@pytest.mark.parametrize(
    ("size", "grows"),
    [
        (lambda frame: 100 * frame, True),
        (lambda frame: 7 + frame // 10, True),
        (lambda frame: frame * frame, True),
        (lambda frame: 42, False),
        (lambda frame: min(frame, 15), False),
        (lambda frame: min(frame, 30), False),
        (lambda frame: 100 - frame, False),
        (lambda frame: frame % 7, False),
        (lambda frame: 10 if frame > 5 else 0, False),
    ],
)
@pytest.mark.parametrize("frames", [60, 100, 400])
def test_growth(size: object, grows: bool, frames: int) -> None:
    assert keeps_growing(sampled(size, frames)) is grows


def test_what_a_frame_adds_is_exact_for_a_line() -> None:
    assert per_frame(sampled(lambda frame: 5 + 1024 * frame)) == 1024
    assert per_frame([]) == per_frame([SizeSample(3, 7)]) == 0


@pytest.mark.parametrize("frames", [10, 60, 500, 20_000])
def test_looks_are_few_and_the_later_part_has_enough(frames: int) -> None:
    looks = [frame for frame in range(1, frames + 1) if looks_at(frame)]
    assert len(looks) <= 36
    assert len(sampled(lambda frame: frame, frames)) >= 3


def test_too_few_samples_tell_nothing() -> None:
    assert not keeps_growing([SizeSample(2, 1), SizeSample(4, 2)])
    assert settled([]) == []


@pytest.mark.parametrize(
    ("name", "classes", "adapter"),
    [
        ("s.output_dict_per_obj[0]", ("dict", "Sam2VideoInferenceSession"), "bound_session"),
        ("s.output_dict_per_obj[0]", ("Records", "Objects", "Sam2VideoInferenceSession"), ""),
        ("state['output_dict']['non_cond_frame_outputs']", ("dict", "dict"), "bound_state"),
        ("cache.layers[0].keys", ("Tensor", "DynamicLayer", "DynamicCache"), "sink_cache"),
        ("model.memory", ("dict", "Model"), ""),
    ],
)
def test_the_adapter_that_bounds_it(name: str, classes: tuple[str, ...], adapter: str) -> None:
    assert adapter_for(name, classes) == adapter
