"""The calls of a real device, with stand-ins for what needs one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from torchtrim.dispatch.calls import (
    heard_by,
    stream_number,
    tell_queried,
    tell_recorded,
    tell_synchronized,
    watch_device,
    watch_prints,
)


class Heard:
    """Writes down what it hears."""

    def __init__(self) -> None:
        self.notes: list[tuple[Any, ...]] = []

    def synchronized(self, row: str, subject: Any) -> None:
        self.notes.append(("synchronized", row, subject))

    def event_recorded(self, event: Any, stream: int) -> None:
        self.notes.append(("recorded", event, stream))

    def event_awaited(self, event: Any, stream: int) -> None:
        self.notes.append(("awaited", event, stream))

    def host_read(self, tensor: torch.Tensor) -> None:
        self.notes.append(("read", tensor))


class Stream:
    """As `torch.cuda.Stream`, which tells its events what to do."""

    def __init__(self, stream_id: int = 7) -> None:
        self.stream_id = stream_id

    def synchronize(self) -> str:
        return "done"

    def query(self) -> bool:
        return self.stream_id > 0

    def wait_event(self, event: Any) -> None:
        event.wait(self)

    def wait_stream(self, stream: Any) -> None:
        self.wait_event(stream.record_event())

    def record_event(self) -> Any:
        event = torch.cuda.Event()
        event.record(self)
        return event


class Event:
    """As `torch.cuda.Event`."""

    done = True

    def record(self, stream: Any = None) -> None: ...

    def wait(self, stream: Any = None) -> None: ...

    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return self.done


@pytest.fixture
def heard(monkeypatch: pytest.MonkeyPatch) -> Iterator[Heard]:
    """Who hears of the calls of a device that is made of stand-ins."""
    for name, value in (
        ("Stream", Stream),
        ("Event", Event),
        ("synchronize", lambda device=None: None),
        ("current_stream", lambda device=None: Stream(3)),
    ):
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda device=None: None)
    with monkeypatch.context() as watched:

        def replace(owner: Any, name: str, value: Any) -> None:
            watched.setattr(owner, name, value)

        watch_device(replace)
        watch_prints(replace)
        hearer = Heard()
        with heard_by(hearer):
            yield hearer


def test_the_device_is_waited_for(heard: Heard) -> None:
    torch.cuda.synchronize()
    torch.cuda.synchronize(0)
    torch.accelerator.synchronize()
    assert heard.notes == [("synchronized", "synchronize", None)] * 3


def test_a_stream_is_waited_for(heard: Heard) -> None:
    stream: Any = torch.cuda.Stream()
    assert stream.synchronize() == "done"
    assert heard.notes == [("synchronized", "stream-synchronize", stream)]


def test_an_event_is_waited_for(heard: Heard) -> None:
    event = torch.cuda.Event()
    event.record()
    event.synchronize()
    assert heard.notes == [("recorded", event, 3), ("synchronized", "event-synchronize", event)]


def test_an_event_is_recorded_on_a_stream_that_is_named(heard: Heard) -> None:
    event, stream = torch.cuda.Event(), torch.cuda.Stream()
    event.record(stream)
    assert heard.notes == [("recorded", event, 7)]


def test_a_stream_waits_for_another(heard: Heard) -> None:
    first, second = Stream(1), Stream(2)
    first.wait_stream(second)
    (_, recorded, on), (_, awaited, by) = heard.notes
    assert recorded is awaited
    assert (on, by) == (2, 1)


@pytest.mark.parametrize("done", [True, False])
def test_what_is_asked_counts_only_if_it_is_done(
    heard: Heard, monkeypatch: pytest.MonkeyPatch, done: bool
) -> None:
    monkeypatch.setattr(Event, "done", done)
    event, stream = torch.cuda.Event(), Stream(5 if done else -1)
    assert event.query() == done
    assert stream.query() == done
    expected = [("synchronized", "", event), ("synchronized", "", stream)]
    assert heard.notes == (expected if done else [])


@pytest.mark.parametrize("read", [torch.Tensor.numpy, torch.Tensor.tolist, str, repr])
def test_reads_that_are_no_operators(heard: Heard, read: Callable[[Any], Any]) -> None:
    x = torch.ones(2)
    getattr(x, read.__name__)() if read.__name__ in ("numpy", "tolist") else read(x)
    assert {note[0] for note in heard.notes} == {"read"}
    assert heard.notes[0][1] is x


def test_who_hears_no_more_is_not_told() -> None:
    first, second = Heard(), Heard()
    with heard_by(first):
        with heard_by(second):
            tell_synchronized("synchronize")
        tell_recorded("event", 1)
        tell_queried(False, "event")
    tell_synchronized("synchronize")
    assert second.notes == [("synchronized", "synchronize", None)]
    assert first.notes == [*second.notes, ("recorded", "event", 1)]


def test_a_hearer_leaves_when_its_block_fails() -> None:
    hearer = Heard()
    with pytest.raises(ZeroDivisionError), heard_by(hearer):
        raise ZeroDivisionError
    tell_synchronized("synchronize")
    assert not hearer.notes


def test_streams_have_numbers(heard: Heard) -> None:
    assert stream_number() == 3
    assert stream_number(Stream(4)) == 4


def test_everything_is_put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    before = torch.Tensor.numpy, torch.Tensor.tolist, torch._tensor_str._str
    replaced: list[tuple[Any, str, Any]] = []

    def replace(owner: Any, name: str, value: Any) -> None:
        replaced.append((owner, name, getattr(owner, name)))
        setattr(owner, name, value)

    for name, value in (("Stream", Stream), ("Event", Event)):
        monkeypatch.setattr(torch.cuda, name, value)
    watch_device(replace)
    watch_prints(replace)
    for owner, name, value in reversed(replaced):
        setattr(owner, name, value)
    assert before == (torch.Tensor.numpy, torch.Tensor.tolist, torch._tensor_str._str)
