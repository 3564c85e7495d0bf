"""Streams and events of the emulated device. Work on it is done as soon as it is queued, so nothing waits;
whoever records tells what *would* wait.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
from collections.abc import Iterator
from typing import Any

from torchtrim.dispatch.calls import tell_awaited, tell_queried, tell_recorded, tell_synchronized
from torchtrim.emulator.tags import DEVICE

_NUMBERS = itertools.count(1)


class Stream:
    """Stands for `torch.cuda.Stream`."""

    def __init__(self, device: Any = None, priority: int = 0, **kwargs: Any) -> None:
        self.device = DEVICE
        self.device_index = 0
        self.priority = priority
        self.stream_id = kwargs.get("stream_id", next(_NUMBERS))
        self.cuda_stream = self.stream_id

    def synchronize(self) -> None:
        """Wait for the stream."""
        tell_synchronized("stream-synchronize", self)

    def query(self) -> bool:
        """Whether all its work is done."""
        tell_queried(True, self)
        return True

    def is_capturing(self) -> bool:
        """Whether its work is being captured into a graph: never."""
        return False

    def wait_stream(self, stream: Any) -> None:
        """Order work queued later after a stream."""
        self.wait_event(stream.record_event())

    def wait_event(self, event: Any) -> None:
        """Order work queued later after an event."""
        event.wait(self)

    def record_event(self, event: Any = None) -> Any:
        """An event after the work queued so far."""
        event = Event() if event is None else event
        event.record(self)
        return event

    def __enter__(self) -> Stream:
        _LOCAL.stack.append(self)
        return self

    def __exit__(self, *_: object) -> None:
        _LOCAL.stack.pop()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Stream) and other.stream_id == self.stream_id

    def __hash__(self) -> int:
        return hash(self.stream_id)

    def __repr__(self) -> str:
        return f"<torch.cuda.Stream device=cuda:0 emulated stream={self.stream_id}>"


class Event:
    """Stands for `torch.cuda.Event`. Its time is the host's."""

    def __init__(
        self,
        enable_timing: bool = False,
        blocking: bool = False,
        interprocess: bool = False,
        **kwargs: Any,
    ) -> None:
        self.device = DEVICE
        self._seconds = 0.0

    def record(self, stream: Any = None) -> None:
        """Note the work queued so far on a stream."""
        chosen = stream if stream is not None else current_stream()
        self._seconds = time.perf_counter()
        tell_recorded(self, chosen.stream_id)

    def wait(self, stream: Any = None) -> None:
        """Order work queued later on a stream after this event."""
        tell_awaited(self, (stream if stream is not None else current_stream()).stream_id)

    def synchronize(self) -> None:
        """Wait for the event."""
        tell_synchronized("event-synchronize", self)

    def query(self) -> bool:
        """Whether the work is done."""
        tell_queried(True, self)
        return True

    def elapsed_time(self, end: Event) -> float:
        """Milliseconds of the host between two events."""
        return (end._seconds - self._seconds) * 1e3


class AnyEvent(Event):
    """Replaces `torch.Event`, which takes the device first."""

    def __init__(self, device: Any = None, *, enable_timing: bool = False, **kwargs: Any) -> None:
        super().__init__(enable_timing)


DEFAULT = Stream(stream_id=0)


class _Local(threading.local):
    def __init__(self) -> None:
        self.stack: list[Stream] = [DEFAULT]


_LOCAL = _Local()


def current_stream(device: Any = None) -> Stream:
    """The stream that work is queued on."""
    return _LOCAL.stack[-1]


def default_stream(device: Any = None) -> Stream:
    """The stream that work is queued on where none was chosen."""
    return DEFAULT


def set_stream(stream: Stream | None) -> None:
    """Choose a stream for good."""
    if stream is not None:
        _LOCAL.stack[-1] = stream


@contextlib.contextmanager
def stream(chosen: Stream | None) -> Iterator[None]:
    """Choose a stream for a while."""
    with contextlib.nullcontext() if chosen is None else chosen:
        yield
