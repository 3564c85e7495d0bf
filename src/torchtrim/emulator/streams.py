"""Streams and events of the emulated device.

Work runs when it is queued, so calls return at once; the recorder is notified of calls that would wait.
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
    """Replaces `torch.cuda.Stream`."""

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
        """Return True if all its work is done."""
        tell_queried(True, self)
        return True

    def is_capturing(self) -> bool:
        """Return False, since graphs are not captured."""
        return False

    def wait_stream(self, stream: Any) -> None:
        """Order work queued later after a stream."""
        self.wait_event(stream.record_event())

    def wait_event(self, event: Any) -> None:
        """Order work queued later after an event."""
        event.wait(self)

    def record_event(self, event: Any = None) -> Any:
        """Record an event after the work queued so far."""
        event = EmulatedEvent() if event is None else event
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


class EmulatedEvent:
    """Replaces `torch.cuda.Event` and `torch.Event`. Measures host time, whatever its options."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.device = DEVICE
        self._seconds = 0.0

    def record(self, stream: Any = None) -> None:
        """Record the work queued so far on a stream."""
        self._seconds = time.perf_counter()
        tell_recorded(self, (stream if stream is not None else current_stream()).stream_id)

    def wait(self, stream: Any = None) -> None:
        """Order work queued later on a stream after this event."""
        tell_awaited(self, (stream if stream is not None else current_stream()).stream_id)

    def synchronize(self) -> None:
        """Wait for the event."""
        tell_synchronized("event-synchronize", self)

    def query(self) -> bool:
        """Return True if the work is done."""
        tell_queried(True, self)
        return True

    def elapsed_time(self, end: EmulatedEvent) -> float:
        """Return the host's milliseconds between two events."""
        return (end._seconds - self._seconds) * 1e3


DEFAULT = Stream(stream_id=0)


class _StreamStack(threading.local):
    def __init__(self) -> None:
        self.stack: list[Stream] = [DEFAULT]


_LOCAL = _StreamStack()


def current_stream(device: Any = None) -> Stream:
    """Return the current stream."""
    return _LOCAL.stack[-1]


def set_stream(stream: Stream | None) -> None:
    """Set the current stream."""
    if stream is not None:
        _LOCAL.stack[-1] = stream


@contextlib.contextmanager
def stream(chosen: Stream | None) -> Iterator[None]:
    """Set the current stream inside the block."""
    with contextlib.nullcontext() if chosen is None else chosen:
        yield
