from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

pytestmark = pytest.mark.usefixtures("device")


def test_streams_are_chosen_for_a_while() -> None:
    default = torch.cuda.current_stream()
    stream = torch.cuda.Stream()
    assert stream != default == torch.cuda.default_stream()
    with torch.cuda.stream(stream):
        assert torch.cuda.current_stream() == stream
        with torch.cuda.stream(None), torch.cuda.StreamContext(default):
            assert torch.cuda.current_stream() == default
    assert torch.cuda.current_stream("cuda:0") == default
    with stream:
        assert torch.accelerator.current_stream() == stream


def test_a_stream_is_left_when_its_block_fails() -> None:
    with pytest.raises(ZeroDivisionError), torch.cuda.stream(torch.cuda.Stream()):
        raise ZeroDivisionError
    assert torch.cuda.current_stream() == torch.cuda.default_stream()


def test_a_stream_may_be_chosen_for_good() -> None:
    stream = torch.cuda.Stream()
    torch.cuda.set_stream(stream)
    try:
        assert torch.cuda.current_stream() == stream
    finally:
        torch.cuda.set_stream(torch.cuda.default_stream())


def test_each_thread_has_its_own() -> None:
    seen: list[Any] = []
    with torch.cuda.stream(torch.cuda.Stream()):
        thread = threading.Thread(target=lambda: seen.append(torch.cuda.current_stream()))
        thread.start()
        thread.join()
    assert seen == [torch.cuda.default_stream()]


def test_streams_are_told_apart() -> None:
    first, second = torch.cuda.Stream(), torch.cuda.Stream(priority=-1)
    assert first != second
    assert len({first, second, torch.cuda.current_stream()}) == 3
    assert second.priority == -1
    assert first.device == torch.device("cuda:0")
    assert first.cuda_stream != second.cuda_stream


def test_events() -> None:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        x = torch.ones(3, device="cuda")
        x.record_stream(stream)
        end.record(stream)
    stream.wait_event(begin)
    torch.cuda.current_stream().wait_stream(stream)
    end.wait()
    end.synchronize()
    stream.synchronize()
    assert begin.elapsed_time(end) >= 0
    assert end.query()
    assert stream.query()
    assert stream.record_event().query()


def test_streams_and_events_of_any_accelerator() -> None:
    stream = torch.Stream("cuda")
    event = torch.Event("cuda", enable_timing=True)
    with stream:
        event.record(stream)
    stream.wait_event(event)
    event.synchronize()
    assert event.query()
