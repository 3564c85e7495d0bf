"""Publishes device calls that are not operators, such as synchronizations, to the recorder."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch

from torchtrim.dispatch.storages import PLAIN


class Hearer(Protocol):
    """A subscriber to device calls, called after each; see the functions `tell_...`."""

    def synchronized(self, row: str, subject: Any) -> None: ...

    def event_recorded(self, event: Any, stream: int) -> None: ...

    def event_awaited(self, event: Any, stream: int) -> None: ...

    def host_read(self, tensor: torch.Tensor) -> None: ...


_hearers: list[Hearer] = []


@contextlib.contextmanager
def heard_by(hearer: Hearer) -> Iterator[None]:
    """Subscribe a listener inside the block."""
    _hearers.append(hearer)
    try:
        yield
    finally:
        _hearers.remove(hearer)


def tell_synchronized(row: str, subject: Any = None) -> None:
    """Report that the host waited for the whole device (`subject` None), a stream or an event.

    `row` names a row of the table in `syncs`, empty if a query found it done.
    """
    for hearer in _hearers:
        hearer.synchronized(row, subject)


def tell_recorded(event: Any, stream: int) -> None:
    """Report that an event was recorded on a stream."""
    for hearer in _hearers:
        hearer.event_recorded(event, stream)


def tell_awaited(event: Any, stream: int) -> None:
    """Report that a stream waits for an event before its later work; the host does not wait."""
    for hearer in _hearers:
        hearer.event_awaited(event, stream)


def tell_read(tensor: torch.Tensor) -> None:
    """Report that the program is about to read a host tensor outside an operator."""
    for hearer in _hearers:
        hearer.host_read(tensor)


def stream_number(stream: Any = None) -> int:
    """Return the id of a stream, by default the current one."""
    return int((torch.cuda.current_stream() if stream is None else stream).stream_id)


def watch_device(replace: Callable[[Any, str, Any], Any]) -> None:
    """Report the calls of a real device. `replace` sets an attribute and returns its former value."""
    cuda: Any = torch.cuda

    def after(owner: Any, name: str, tell: Callable[..., None]) -> None:
        own = getattr(owner, name)

        @functools.wraps(own)
        def call(*args: Any, **kwargs: Any) -> Any:
            result = own(*args, **kwargs)
            tell(result, *args)
            return result

        replace(owner, name, call)

    for owner in (cuda, torch.accelerator):
        after(owner, "synchronize", lambda result, *args: tell_synchronized("synchronize"))
    after(cuda.Stream, "synchronize", lambda _, s: tell_synchronized("stream-synchronize", s))
    after(cuda.Event, "synchronize", lambda _, e: tell_synchronized("event-synchronize", e))
    for owner in (cuda.Stream, cuda.Event):
        after(owner, "query", tell_queried)
    after(cuda.Event, "record", lambda _, e, s=None: tell_recorded(e, stream_number(s)))
    after(cuda.Event, "wait", lambda _, e, s=None: tell_awaited(e, stream_number(s)))
    for name in ("numpy", "tolist"):
        replace(torch.Tensor, name, _telling(getattr(torch.Tensor, name)))


def tell_queried(done: bool, subject: Any) -> None:
    """Report a query that found an event or stream done, without a wait."""
    if done:
        tell_synchronized("", subject)


def watch_prints(replace: Callable[[Any, str, Any], Any]) -> None:
    """Show dispatch modes the operators that print a tensor, which torch hides from them."""
    own: Any = torch._tensor_str._str
    inner: Any = torch._tensor_str._str_intern

    def text(tensor: torch.Tensor, **kwargs: Any) -> str:
        tell_read(tensor)
        if type(tensor) not in PLAIN or not tensor.is_cuda:
            return str(own(tensor, **kwargs))
        with torch.no_grad():
            return str(inner(tensor, **kwargs))

    replace(torch._tensor_str, "_str", text)


def _telling(own: Any) -> Any:
    @functools.wraps(own)
    def read(self: Any, *args: Any, **kwargs: Any) -> Any:
        tell_read(self)
        return own(self, *args, **kwargs)

    return read
