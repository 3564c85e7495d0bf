"""Detects host-device syncs, and reads of data whose copy has not finished."""

from __future__ import annotations

import contextlib
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from enum import Enum
from functools import cache
from typing import Any, NamedTuple

import torch

from torchtrim.dispatch.calls import heard_by, stream_number, watch_device, watch_prints
from torchtrim.dispatch.modes import tensors_among
from torchtrim.emulator.device import Emulation
from torchtrim.emulator.orders import Orders
from torchtrim.syncs.base import Row
from torchtrim.syncs.explicit import BACKWARD
from torchtrim.syncs.lookup import rows_for

UNLISTED = "unlisted"
NEW_TENSOR = "new-tensor"
ASYNC_READ = "async-read"
ASYNC_SOURCE = "async-source"
_VERSION = str(torch.__version__)
_COPIES = ("aten::_to_copy.default", "aten::copy_.default")


class RawSync(NamedTuple):
    """A sync: its row in `syncs`, and its operator's number or -1."""

    row: str
    operator: int


Note = Callable[[RawSync], None]


class Asked(NamedTuple):
    """An operator that has run, as `syncs.base` expects it."""

    name: str
    args: Mapping[str, Any]
    result: Any
    is_on_device: Callable[[Any], bool]
    is_pinned: Callable[[Any], bool]


class _Flight(NamedTuple):
    """A copy that may be in flight: the stream it was queued on, and its serial number."""

    stream: int
    serial: int
    watch: weakref.ref[Any]


class _Join(NamedTuple):
    """From `serial` on, a stream runs after the work queued on another stream up to `until`."""

    serial: int
    stream: int
    until: int


class Waits:
    """A lookup of operators in the table of syncs, and a tracker of copies in flight.

    `note` is called for each sync and each race: a read of a host tensor (`async-read`), or a write to one
    (`async-source`), while a copy into or out of it may be in flight.
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
        """Note the operator's syncs according to the rows; return their number.

        `uploaded` are tensors that torch creates from lists on the device, and that are on the host here.
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
        """Note the syncs that CUDA counted beyond those of the table (`told`)."""
        for _ in range(count - told):
            self._note(RawSync(UNLISTED, operator))

    def copied(
        self, func: Any, args: Any, kwargs: Any, result: Any, operator: int, *, temporary: bool
    ) -> None:
        """Track a queued copy. `temporary`: its source is freed when the call returns."""
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
        """Note a sync in the backward of an autograd node, after its first operator."""
        row = BACKWARD.get(node.name())
        if row is not None and any(map(self.is_on_device, tensors)):
            self._note(RawSync(row.name, operator))

    def touched(
        self, func: Any, read: Iterable[Any], written: Iterable[Any], operator: int
    ) -> None:
        """Note reads and writes of host tensors whose copy is in flight."""
        if func.is_view:
            return
        if any(self._lands(self._downloads, tensor) for tensor in read):
            self._note(RawSync(ASYNC_READ, operator))
        if any(self._lands(self._uploads, tensor) for tensor in written):
            self._note(RawSync(ASYNC_SOURCE, operator))

    def in_flight(self) -> bool:
        """Return True if any copy may be in flight."""
        return bool(self._downloads or self._uploads)

    def host_read(self, tensor: Any) -> None:
        """Note a read of a tensor outside an operator, if its copy is in flight."""
        if self._lands(self._downloads, tensor):
            self._note(RawSync(ASYNC_READ, -1))

    def synchronized(self, row: str, subject: Any) -> None:
        """Handle a wait for the device, a stream or an event; an empty `row` means it was found done."""
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
        """Handle an event recorded on a stream."""
        self._clock += 1
        self._events[event] = (stream, self._clock)

    def event_awaited(self, event: Any, stream: int) -> None:
        """Handle a stream that waits for an event."""
        self._clock += 1
        if (recorded := self._events.get(event)) is not None:
            self._joins.setdefault(stream, []).append(_Join(self._clock, *recorded))

    def _is_straight(self, target: Any) -> bool:
        """Return True if a copy to the host is asynchronous: into contiguous pinned memory."""
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
        """Track a copy into or out of a host tensor."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        self._clock += 1

        def freed(_: Any) -> None:
            flights.pop(key, None)

        flights[key] = _Flight(stream_number(), self._clock, weakref.ref(storage, freed))

    def _lands(self, flights: dict[int, _Flight], tensor: Any) -> bool:
        """Return True if a copy of the tensor was in flight, once per copy."""
        key = _key(tensor)
        return key is not None and flights.pop(key, None) is not None

    def _arrived(self, stream: int, until: int | None = None) -> None:
        """Mark a stream's work up to `until` (default: all) as done, and the work it waited for."""
        reached = self._reached(stream, self._clock if until is None else until)
        for flights in (self._downloads, self._uploads):
            for key, flight in list(flights.items()):
                if flight.serial <= reached.get(flight.stream, -1):
                    del flights[key]

    def _reached(self, stream: int, until: int) -> dict[int, int]:
        """Return how far each stream is done if `stream` is done up to `until`. Later joins come first, so
        that streams that wait for each other repeatedly are visited once."""
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
    """Return the table's rows for an operator."""
    return rows_for(_full_name(func), _VERSION)


def is_copy(func: Any) -> bool:
    """Return True for operators that copy between devices."""
    return _full_name(func) in _COPIES


def _full_name(func: Any) -> str:
    name: str = func.name()
    return name if "." in name else f"{name}.default"


def _bound(func: Any, args: Any, kwargs: Any) -> dict[str, Any]:
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


class Ran(NamedTuple):
    """An operator that has run; `written`: position and name of each argument it wrote."""

    number: int
    func: Any
    args: Any
    kwargs: Any
    result: Any
    written: tuple[tuple[int, str], ...]


class Asking(NamedTuple):
    """Checks for an operator: the table's rows, and whether it copies between devices or indexes."""

    rows: tuple[Row, ...]
    copies: bool
    indexes: bool


NOTHING = Asking((), False, False)
_INDEXING = ("aten::index", "aten::index_put", "aten::index_put_")


class Origin(Enum):
    """Where a host tensor that an operator reads was created: in its call, on its line, or elsewhere."""

    CALL = 1
    LINE = 2
    ELSEWHERE = 3


FindsOrigin = Callable[[int, torch.Tensor], Origin]
"""Called with an operator's number and a tensor that it reads."""


class Waiting:
    """The recorder's sync detector: call `ran` for each operator; it calls `note` for each sync."""

    def __init__(self, emulation: Emulation | None, note: Callable[[RawSync], None]) -> None:
        self._emulation = emulation
        self._orders = None if emulation is None else emulation.orders
        self._note = note
        if emulation is not None:
            self._waits = Waits(emulation.tags.on_device, emulation.tags.is_pinned, note)
        else:
            self._waits = Waits(lambda t: t.is_cuda, lambda t: t.is_pinned(), note)
        self._node: Any = None
        self._counter: SyncCounter | None = None
        self._counted = 0

    def watch(self, undo: contextlib.ExitStack) -> None:
        """Listen to non-operator calls until `undo` is closed; an emulated device reports its own."""

        def replace(owner: Any, name: str, value: Any) -> None:
            undo.callback(setattr, owner, name, getattr(owner, name))
            setattr(owner, name, value)

        undo.enter_context(heard_by(self._waits))
        watch_prints(replace)
        if self._emulation is None:
            watch_device(replace)
            self._counter = SyncCounter()
            undo.enter_context(self._counter.counting())

    def asking(self, func: Any) -> Asking:
        """Return the checks for an operator."""
        indexes = func.name().partition(".")[0] in _INDEXING
        return Asking(rows_of(func), is_copy(func), indexes)

    def listens(self, node: Any) -> bool:
        """Return True if `ran` is needed even for an operator without checks."""
        new = node is not None and node is not self._node
        return (
            new or self._orders is not None or self._counter is not None or self._waits.in_flight()
        )

    def ran(self, ran: Ran, asking: Asking, node: Any, origin: FindsOrigin) -> None:
        """Check an operator that has run; `node` is its autograd node in backward."""
        waits = self._waits
        if self._orders is not None:
            self._note_races(self._orders, ran.number)
        if waits.in_flight() and not asking.copies:
            written = (ran.args[at] for at, _ in ran.written if at < len(ran.args))
            waits.touched(ran.func, tensors_among(ran.args), tensors_among(written), ran.number)
        operands = (ran.func, ran.args, ran.kwargs, ran.result, ran.number)
        told = 0
        if asking.rows:
            lists = tuple(self._lists(ran, origin)) if asking.indexes else ()
            told = waits.ask(asking.rows, *operands, uploaded=lists)
        if asking.copies:
            source = ran.args[0] if len(ran.args) == 1 else ran.args[1]
            temporary = origin(ran.number, source) is not Origin.ELSEWHERE
            waits.copied(*operands, temporary=temporary)
        if self._counter is not None:
            waits.seen(self._counter.count - self._counted, told, ran.number)
            self._counted = self._counter.count
        if node is not None and node is not self._node:
            self._node = node
            waits.differentiated(node, tensors_among(ran.args), ran.number)

    def _note_races(self, orders: Orders, number: int) -> None:
        """Note races between streams: the operator's own, or an earlier operator's."""
        last = orders.clocks.last
        if last is not None and last.operator < 0:
            last.operator = number
        for race in orders.races():
            if race.access.operator >= 0:
                self._note(RawSync(race.row, race.access.operator))

    def _lists(self, ran: Ran, origin: FindsOrigin) -> Iterator[torch.Tensor]:
        """Yield the indices that the call created from lists; torch creates them on the device."""
        is_on_device = self._waits.is_on_device
        if not is_on_device(ran.args[0]):
            return
        for index in ran.args[1]:
            made_here = index is not None and index.numel() and not is_on_device(index)
            if made_here and origin(ran.number, index) is Origin.CALL:
                yield index


def waiting_here(emulation: Emulation | None, note: Callable[[RawSync], None]) -> Waiting | None:
    """Return a sync detector, or None if there is no device to synchronize with."""
    there = emulation is not None or torch.cuda.is_available()
    return Waiting(emulation, note) if there else None


_WORDS = "synchronizing CUDA operation"


class SyncCounter:
    """A counter of CUDA's sync warnings (`torch.cuda.set_sync_debug_mode`). Other warnings pass through.

    CUDA does not warn of `synchronize()` of devices and events, nor of copies that only the driver blocks on;
    `dispatch.calls` and `syncs` cover those."""

    def __init__(self) -> None:
        self.count = 0

    @contextlib.contextmanager
    def counting(self) -> Iterator[None]:
        """Count inside the block."""
        cuda: Any = torch.cuda
        before = cuda.get_sync_debug_mode()
        with warnings.catch_warnings():
            warnings.filterwarnings("always", message=f".*{_WORDS}")
            shown = warnings.showwarning
            warnings.showwarning = self._counted(shown)
            cuda.set_sync_debug_mode("warn")
            try:
                yield
            finally:
                cuda.set_sync_debug_mode(before)

    def _counted(self, shown: Any) -> Any:
        def show(message: Any, *args: Any, **kwargs: Any) -> None:
            if _WORDS in str(message):
                self.count += 1
            else:
                shown(message, *args, **kwargs)

        return show
