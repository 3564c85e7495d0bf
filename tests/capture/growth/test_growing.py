"""Growth of streams in this process: what is seen, what is not, and that nothing stays behind."""

from __future__ import annotations

import collections
import functools
import gc
import sys
import threading
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from torchtrim.capture.growth.records import MeasuredGrowth, measure_growth
from torchtrim.errors import UsageError


class Asked(collections.OrderedDict):
    """A mapping that does something when it is asked, as lazy ones do."""

    def items(self) -> Any:
        raise AssertionError("nobody may ask")

    keys = values = __iter__ = __len__ = items


class Slotted:
    __slots__ = ("kept",)

    def __init__(self) -> None:
        self.kept: list[torch.Tensor] = []


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.slotted = Slotted()
        self.asked = Asked()

    def forward(self, x: torch.Tensor) -> Any:
        return torch.tanh(self.layer(x))


def stream(each: Any, frames: int = 30, model: Model | None = None) -> MeasuredGrowth:
    model = model or Model()

    def run() -> None:
        for frame in range(frames):
            with torch.no_grad():
                each(model, frame, model(torch.ones(1, 8)))

    return measure_growth(run)


def names(measured: MeasuredGrowth) -> list[tuple[str, str]]:
    return [(one.kind, one.name) for one in measured.profile.growths]


def test_what_coverage_keeps_is_no_growth() -> None:
    pytest.importorskip("coverage")
    collector = type("Collector", (), {"__module__": "coverage.collector"})()
    collector.data = {"file.py": set()}
    assert not names(stream(lambda model, frame, output: collector.data["file.py"].add(frame)))


def test_containers_of_all_kinds_are_named() -> None:
    model = Model()
    newest: Any = collections.deque()
    seen: set[int] = set()
    nested = {"objects": [{"frames": Asked()}]}

    def each(model: Model, frame: int, out: torch.Tensor) -> None:
        model.slotted.kept.append(out)
        newest.append(out + 1)
        seen.add(10_000 + frame)
        dict.__setitem__(nested["objects"][0]["frames"], frame, out * 2)

    measured = stream(each, model=model)
    kinds = dict(names(measured))
    assert kinds["list"].endswith(".slotted.kept")
    assert kinds["deque"].endswith("newest")
    assert kinds["set"].endswith("seen")
    assert kinds["Asked"].endswith("nested['objects'][0]['frames']")
    assert len(measured.profile.growths) == 4
    places = {measured.profile.places[one.place].function for one in measured.profile.growths}
    assert all(place.endswith("each") for place in places)


@pytest.mark.slow
def test_what_is_bounded_or_falls_is_no_growth() -> None:
    newest: Any = collections.deque(maxlen=1000)
    window: list[torch.Tensor] = []
    sawtooth: list[torch.Tensor] = []

    @functools.lru_cache(maxsize=500)
    def table(frame: int) -> torch.Tensor:
        return torch.full((4,), float(frame))

    def each(model: Model, frame: int, out: torch.Tensor) -> None:
        newest.append(out)
        window.append(out)
        del window[:-5]
        sawtooth.append(out)
        if frame % 7 == 6:
            sawtooth.clear()
        table(frame)

    measured = stream(each, frames=60)
    assert [one for one in names(measured) if one[0] != "tensor"] == []


def test_shared_storages_are_counted_once() -> None:
    whole: list[torch.Tensor] = []
    views: list[torch.Tensor] = []

    def each(model: Model, frame: int, out: torch.Tensor) -> None:
        batch = torch.zeros(1024)
        whole.append(batch)
        views.append(batch[:1])

    measured = stream(each)
    assert 4096 <= measured.stream.growth_bytes < 2 * 4096


def test_a_frame_may_be_another_module_or_a_function() -> None:
    model = Model()

    def step() -> Any:
        return [model(torch.ones(1, 8)) for _ in range(3)]

    def run() -> None:
        for _ in range(12):
            step()

    for name, frames in ((None, 36), ("Linear", 36), (step.__qualname__, 12)):
        measured = measure_growth(run, frames_of=name)
        assert measured.stream.frames == frames
    with pytest.raises(UsageError, match=r"0 frames were seen.*Model \(36\)"):
        measure_growth(run, frames_of="Linnear")
    assert sys.getprofile() is None


def test_too_few_frames() -> None:
    with pytest.raises(UsageError, match="5 frames were seen"):
        stream(lambda *_: None, frames=5)


def test_nothing_stays_behind_even_where_the_stream_fails() -> None:
    call, trace = nn.Module.__call__, sys.gettrace()
    kept: list[Any] = []

    def fails(model: Model, frame: int, out: torch.Tensor) -> None:
        kept.append(out)
        if frame == 20:
            raise RuntimeError("no more")

    with pytest.raises(RuntimeError, match="no more"):
        stream(fails)
    assert nn.Module.__call__ is call
    assert sys.gettrace() is trace
    assert _get_current_dispatch_mode_stack() == []


def test_watching_keeps_nothing_alive() -> None:
    """Old values of variables that a frame was asked for would stay with it."""
    sizes: list[int] = []

    def each(model: Model, frame: int, out: torch.Tensor) -> None:
        model.asked_for = out  # type: ignore[assignment]
        alive = [t for t in gc.get_objects() if type(t) is torch.Tensor and t.numel() == 8]
        sizes.append(len(alive))

    stream(each, frames=30)
    assert max(sizes) <= 2
    assert sizes[-5:] == sizes[:1] * 5


def test_threads_that_run_meanwhile_do_not_disturb() -> None:
    stop = threading.Event()
    model, other = Model(), Model()

    def busy() -> None:
        while not stop.is_set():
            other(torch.ones(1, 8))

    thread = threading.Thread(target=busy)
    thread.start()
    try:
        measured = stream(lambda *_: None, frames=20, model=model)
    finally:
        stop.set()
        thread.join()
    assert measured.stream.frames == 20
