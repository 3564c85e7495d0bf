"""Notes each host-device sync, and each read of data that has not arrived yet."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple

import torch

from torchtrim.dispatch.calls import stream_number
from torchtrim.syncs.base import Row
from torchtrim.syncs.hidden import BACKWARD
from torchtrim.syncs.lookup import rows_for

UNLISTED = "unlisted"
NEW_TENSOR = "new-tensor"
ASYNC_READ = "async-read"
ASYNC_SOURCE = "async-source"
_VERSION = str(torch.__version__)
_COPIES = ("aten::_to_copy.default", "aten::copy_.default")


class RawSync(NamedTuple):
    """A wait as noted: row of `syncs`, and operator; -1 for a call of no operator."""

    row: str
    operator: int


Note = Callable[[RawSync], None]


class Asked(NamedTuple):
    """An operator that has run, as `sync.row.Ask` wants it."""

    name: str
    args: Mapping[str, Any]
    result: Any
    is_on_device: Callable[[Any], bool]
    is_pinned: Callable[[Any], bool]


class _Flight(NamedTuple):
    """A copy that may still be under way: the stream it was queued on, and when."""

    stream: int
    serial: int
    watch: weakref.ref[Any]


class _Join(NamedTuple):
    """From `serial` on a stream is behind the work queued on another until `until`."""

    serial: int
    stream: int
    until: int


class Waits:
    """Asks the table about operators, and keeps track of copies that the host did not synchronize with.

    `note` is called for each sync, and for each race: a read of a tensor of the host (`async-read`), or a
    write to one (`async-source`), while a copy into it or out of it may be under way.
    """

    def __init__(
        self,
        is_on_device: Callable[[Any], bool],
        is_pinned: Callable[[Any], bool],
        note: Note,
    ) -> None:
        self._clock = 0
        self.is_on_device = is_on_device
        self._is_pinned = is_pinned
        self._note = note
        self._downloads: dict[int, _Flight] = {}
        self._uploads: dict[int, _Flight] = {}
        self._joins: dict[int, list[_Join]] = {}
        self._events: weakref.WeakKeyDictionary[Any, tuple[int, int]] = weakref.WeakKeyDictionary()

    def ask(
        self,
        rows: tuple[Row, ...],
        func: Any,
        args: Any,
        kwargs: Any,
        result: Any,
        operator: int,
        *,
        uploaded: Sequence[Any] = (),
    ) -> int:
        """Note the operator as often as the rows say that it waits; how often that is.

        `uploaded` are tensors that torch makes of a list on the device, and here were made on the host.
        """
        asked = self._asked(func, args, kwargs, result, uploaded)
        noted = [RawSync(NEW_TENSOR, operator)] * len(uploaded)
        noted += [RawSync(row.name, operator) for row in rows for _ in range(row.waits(asked))]
        for sync in noted:
            self._note(sync)
        if noted:
            self._arrived(stream_number())
        return len(noted)

    def seen(self, count: int, told: int, operator: int) -> None:
        """CUDA saw `count` waits of an operator, and the table told `told`: note what is over."""
        for _ in range(count - told):
            self._note(RawSync(UNLISTED, operator))

    def copied(
        self, func: Any, args: Any, kwargs: Any, result: Any, operator: int, *, temporary: bool
    ) -> None:
        """A copy was queued. `temporary`: its source was made for it, and is gone when it returns."""
        asked = self._asked(func, args, kwargs, result)
        new = asked.name == _COPIES[0]
        source = asked.args["self" if new else "src"]
        target = result if new else asked.args["self"]
        down, up = self.is_on_device(source), self.is_on_device(target)
        if not down and not up:
            self.touched(func, (source,), () if new else (target,), operator)
        elif not asked.args.get("non_blocking"):
            return
        elif down and not up and (new or self._is_straight(target)):
            self._leave(self._downloads, target)
        elif up and not down and self._is_pinned(source):
            self._leave(self._uploads, source)
        elif up and not down and temporary:
            self._note(RawSync(ASYNC_SOURCE, operator))

    def differentiated(self, node: Any, tensors: Iterable[Any], operator: int) -> None:
        """The first operator of a node of autograd has run."""
        row = BACKWARD.get(node.name())
        if row is not None and any(map(self.is_on_device, tensors)):
            self._note(RawSync(row.name, operator))

    def touched(
        self, func: Any, read: Iterable[Any], written: Iterable[Any], operator: int
    ) -> None:
        """An operator reads and writes tensors of the host: note those that a copy is about."""
        if func.is_view:
            return
        if any(self._lands(self._downloads, tensor) for tensor in read):
            self._note(RawSync(ASYNC_READ, operator))
        if any(self._lands(self._uploads, tensor) for tensor in written):
            self._note(RawSync(ASYNC_SOURCE, operator))

    def in_flight(self) -> bool:
        """Whether any copy may be under way."""
        return bool(self._downloads or self._uploads)

    def host_read(self, tensor: Any) -> None:
        """A tensor is read by what is no operator."""
        if self._lands(self._downloads, tensor):
            self._note(RawSync(ASYNC_READ, -1))

    def synchronized(self, row: str, subject: Any) -> None:
        """The host has waited for the device, a stream or an event; `row` empty: it found it done."""
        if row:
            self._note(RawSync(row, -1))
        if subject is None:
            self._downloads.clear()
            self._uploads.clear()
        elif hasattr(subject, "stream_id"):
            self._arrived(stream_number(subject))
        elif (recorded := self._events.get(subject)) is not None:
            self._arrived(*recorded)

    def event_recorded(self, event: Any, stream: int) -> None:
        """An event was put behind the work queued on a stream."""
        self._clock += 1
        self._events[event] = (stream, self._clock)

    def event_awaited(self, event: Any, stream: int) -> None:
        """A stream was ordered after an event."""
        self._clock += 1
        if (recorded := self._events.get(event)) is not None:
            self._joins.setdefault(stream, []).append(_Join(self._clock, *recorded))

    def _is_straight(self, target: Any) -> bool:
        """Whether a copy to the host may be late: to memory that is not pinned it blocks."""
        return self._is_pinned(target) and bool(target.is_contiguous())

    def _asked(
        self, func: Any, args: Any, kwargs: Any, result: Any, uploaded: Sequence[Any] = ()
    ) -> Asked:
        bound = _bound(func, args, kwargs)
        name = _full_name(func)
        if name == _COPIES[0]:
            bound["device"] = result.device
        is_on_device = self.is_on_device
        if uploaded:

            def is_on_device(tensor: Any) -> bool:
                return any(tensor is one for one in uploaded) or self.is_on_device(tensor)

        return Asked(name, bound, result, is_on_device, self._is_pinned)

    def _leave(self, flights: dict[int, _Flight], tensor: Any) -> None:
        """A copy into or out of a tensor of the host begins."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        self._clock += 1

        def freed(_: Any) -> None:
            flights.pop(key, None)

        flights[key] = _Flight(stream_number(), self._clock, weakref.ref(storage, freed))

    def _lands(self, flights: dict[int, _Flight], tensor: Any) -> bool:
        """Whether a copy of the tensor was under way; true once a copy."""
        key = _key(tensor)
        return key is not None and flights.pop(key, None) is not None

    def _arrived(self, stream: int, until: int | None = None) -> None:
        """The work queued on a stream is done: all of it, or that before an event was recorded.

        So is the work that the stream was ordered after by then.
        """
        reached = self._reached(stream, self._clock if until is None else until)
        for flights in (self._downloads, self._uploads):
            for key, flight in list(flights.items()):
                if flight.serial <= reached.get(flight.stream, -1):
                    del flights[key]

    def _reached(self, stream: int, until: int) -> dict[int, int]:
        """How far each stream is done where one is done until a moment. The latest joins are looked at first,
        so that streams that await each other again and again are gone through once."""
        reached: dict[int, int] = {}
        waiting = [(stream, until)]
        while waiting:
            number, moment = waiting.pop()
            before = reached.get(number, -1)
            if moment <= before:
                continue
            reached[number] = moment
            for join in self._joins.get(number, ()):
                if before < join.serial <= moment:
                    waiting.append((join.stream, join.until))
        return reached


def rows_of(func: Any) -> tuple[Row, ...]:
    """The rows of the table that an operator is to be asked by."""
    return rows_for(_full_name(func), _VERSION)


def is_copy(func: Any) -> bool:
    """Whether an operator copies between devices."""
    return _full_name(func) in _COPIES


def _full_name(func: Any) -> str:
    name: str = func.name()
    return name if "." in name else f"{name}.default"


def _bound(func: Any, args: Any, kwargs: Any) -> dict[str, Any]:
    """Arguments by the names of the schema, with its defaults."""
    names, defaults = _signature(func)
    return {**defaults, **dict(zip(names, args, strict=False)), **kwargs}


@cache
def _signature(func: Any) -> tuple[tuple[str, ...], dict[str, Any]]:
    arguments = func._schema.arguments
    return tuple(argument.name for argument in arguments), {
        argument.name: argument.default_value if argument.has_default_value() else None
        for argument in arguments
    }


def _key(tensor: torch.Tensor) -> int | None:
    try:
        return int(tensor.untyped_storage()._cdata)
    except (NotImplementedError, RuntimeError):
        return None
