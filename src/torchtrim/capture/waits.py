"""Detects host-device syncs, and reads of data whose copy has not finished."""

from __future__ import annotations

import contextlib
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from enum import Enum
from functools import cache
from typing import Any, NamedTuple

import torch

from torchtrim.dispatch.calls import heard_by, stream_number, watch_device, watch_prints
from torchtrim.dispatch.modes import full_name, tensors_among
from torchtrim.emulator.device import Emulation
from torchtrim.emulator.orders import Orders
from torchtrim.syncs.base import Ask, Row
from torchtrim.syncs.explicit import BACKWARD
from torchtrim.syncs.lookup import rows_for

UNLISTED = "unlisted"
NEW_TENSOR = "new-tensor"
ASYNC_READ = "async-read"
ASYNC_SOURCE = "async-source"
_VERSION = str(torch.__version__)
_COPIES = ("aten::_to_copy.default", "aten::copy_.default")
_INDEXING = ("aten::index", "aten::index_put", "aten::index_put_")

Note = Callable[[str, int], None]
"""Called with a sync's row in `syncs`, and its operator's number or -1."""


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


class Ran(NamedTuple):
    """An operator that has run; `written`: position and name of each argument it wrote."""

    number: int
    func: Any
    args: Any
    kwargs: Any
    result: Any
    written: tuple[tuple[int, str], ...]


class SyncChecks(NamedTuple):
    """Checks for an operator: the table's rows, and whether it copies between devices or indexes."""

    rows: tuple[Row, ...]
    copies: bool
    indexes: bool


NOTHING = SyncChecks((), False, False)


class Origin(Enum):
    """Where a host tensor that an operator reads was created: in its call, on its line, or elsewhere."""

    CALL = 1
    LINE = 2
    ELSEWHERE = 3


FindsOrigin = Callable[[int, torch.Tensor], Origin]
"""Called with an operator's number and a tensor that it reads."""


class SyncDetector:
    """The recorder's sync detector. Call `ran` for each operator; syncs are looked up in the table.

    `note` is called for each sync and each race: a read of a host tensor (`async-read`), or a write to one
    (`async-source`), while a copy into or out of it may be in flight.
    """

    def __init__(self, emulation: Emulation | None, note: Note) -> None:
        self._emulation = emulation
        self._orders = None if emulation is None else emulation.orders
        self._note = note
        self._is_on_device: Callable[[Any], bool] = lambda tensor: tensor.is_cuda
        self._is_pinned: Callable[[Any], bool] = lambda tensor: tensor.is_pinned()
        if emulation is not None:
            self._is_on_device = emulation.tags.on_device
            self._is_pinned = emulation.tags.is_pinned
        self._clock = 0
        self._downloads: dict[int, _Flight] = {}
        self._uploads: dict[int, _Flight] = {}
        self._joins: dict[int, list[_Join]] = {}
        self._events: weakref.WeakKeyDictionary[Any, tuple[int, int]] = weakref.WeakKeyDictionary()
        self._node: Any = None
        self._counter: SyncCounter | None = None
        self._counted = 0

    def watch(self, undo: contextlib.ExitStack) -> None:
        """Listen to non-operator calls until `undo` is closed; an emulated device reports its own."""

        def replace(owner: Any, name: str, value: Any) -> None:
            undo.callback(setattr, owner, name, getattr(owner, name))
            setattr(owner, name, value)

        undo.enter_context(heard_by(self))
        watch_prints(replace)
        if self._emulation is None:
            watch_device(replace)
            self._counter = SyncCounter()
            undo.enter_context(self._counter.counting())

    def checks(self, func: Any) -> SyncChecks:
        """Return the checks for an operator."""
        name = full_name(func)
        indexes = name.partition(".")[0] in _INDEXING
        return SyncChecks(rows_for(name, _VERSION), name in _COPIES, indexes)

    def listens(self, node: Any) -> bool:
        """Return True if `ran` is needed even for an operator without checks."""
        if (node is not None and node is not self._node) or self._orders or self._counter:
            return True
        return bool(self._downloads or self._uploads)

    def ran(self, ran: Ran, checks: SyncChecks, node: Any, origin: FindsOrigin) -> None:
        """Check an operator that has run; `node` is its autograd node in backward."""
        if self._orders is not None:
            self._note_races(self._orders, ran.number)
        if not checks.copies:
            written = (ran.args[at] for at, _ in ran.written if at < len(ran.args))
            self._touched(ran, tensors_among(ran.args), tensors_among(written))
        noted = 0
        if checks.rows:
            lists = tuple(self._lists(ran, origin)) if checks.indexes else ()
            noted = self._look_up(checks.rows, ran, lists)
        if checks.copies:
            source = ran.args[0] if len(ran.args) == 1 else ran.args[1]
            self._copied(ran, temporary=origin(ran.number, source) is not Origin.ELSEWHERE)
        if self._counter is not None:
            for _ in range(self._counter.count - self._counted - noted):
                self._note(UNLISTED, ran.number)
            self._counted = self._counter.count
        if node is not None and node is not self._node:
            self._node = node
            row = BACKWARD.get(node.name())
            if row is not None and any(map(self._is_on_device, tensors_among(ran.args))):
                self._note(row.name, ran.number)

    def _note_races(self, orders: Orders, number: int) -> None:
        """Note races between streams: the operator's own, or an earlier operator's."""
        last = orders.clocks.last
        if last is not None and last.operator < 0:
            last.operator = number
        for race in orders.races():
            if race.access.operator >= 0:
                self._note(race.row, race.access.operator)

    def _lists(self, ran: Ran, origin: FindsOrigin) -> Iterator[torch.Tensor]:
        """Yield the indices that the call created from lists; torch creates them on the device."""
        if not self._is_on_device(ran.args[0]):
            return
        for index in ran.args[1]:
            on_host = index is not None and index.numel() and not self._is_on_device(index)
            if on_host and origin(ran.number, index) is Origin.CALL:
                yield index

    def _look_up(self, rows: tuple[Row, ...], ran: Ran, uploaded: Sequence[Any]) -> int:
        """Note the operator's syncs according to the rows; return their number.

        `uploaded` are tensors that torch creates from lists on the device, and that are on the host here.
        """
        call = self._call(ran, uploaded)
        names = [NEW_TENSOR] * len(uploaded)
        names += [row.name for row in rows for _ in range(row.waits(call))]
        for name in names:
            self._note(name, ran.number)
        if names:
            self._arrived(stream_number())
        return len(names)

    def _copied(self, ran: Ran, *, temporary: bool) -> None:
        call = self._call(ran)
        new = call.name == _COPIES[0]
        source = call.args["self" if new else "src"]
        target = ran.result if new else call.args["self"]
        down, up = self._is_on_device(source), self._is_on_device(target)
        if not down and not up:
            self._touched(ran, (source,), () if new else (target,))
        elif not call.args.get("non_blocking"):
            return
        elif down and not up and (new or (self._is_pinned(target) and target.is_contiguous())):
            self._leave(self._downloads, target)
        elif up and not down and self._is_pinned(source):
            self._leave(self._uploads, source)
        elif up and not down and temporary:
            self._note(ASYNC_SOURCE, ran.number)

    def _touched(self, ran: Ran, read: Iterable[Any], written: Iterable[Any]) -> None:
        if not (self._downloads or self._uploads) or ran.func.is_view:
            return
        if any(self._lands(self._downloads, tensor) for tensor in read):
            self._note(ASYNC_READ, ran.number)
        if any(self._lands(self._uploads, tensor) for tensor in written):
            self._note(ASYNC_SOURCE, ran.number)

    def host_read(self, tensor: Any) -> None:
        """Note a read of a tensor outside an operator, if its copy is in flight."""
        if self._lands(self._downloads, tensor):
            self._note(ASYNC_READ, -1)

    def synchronized(self, row: str, subject: Any) -> None:
        """Handle a wait for the device, a stream or an event; `row` is empty if a query found it done."""
        if row:
            self._note(row, -1)
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

    def _call(self, ran: Ran, uploaded: Sequence[Any] = ()) -> Ask:
        names, defaults = _signature(ran.func)
        args = {**defaults, **dict(zip(names, ran.args, strict=False)), **ran.kwargs}
        name = full_name(ran.func)
        if name == _COPIES[0]:
            args["device"] = ran.result.device
        is_on_device = self._is_on_device
        if uploaded:

            def is_on_device(tensor: Any) -> bool:
                return any(tensor is one for one in uploaded) or self._is_on_device(tensor)

        return Ask(name, args, ran.result, is_on_device, self._is_pinned)

    def _leave(self, flights: dict[int, _Flight], tensor: Any) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        self._clock += 1

        def freed(_: Any) -> None:
            flights.pop(key, None)

        flights[key] = _Flight(stream_number(), self._clock, weakref.ref(storage, freed))

    def _lands(self, flights: dict[int, _Flight], tensor: Any) -> bool:
        """Return True if a copy of the tensor was in flight, once per copy."""
        try:
            return flights.pop(tensor.untyped_storage()._cdata, None) is not None
        except (NotImplementedError, RuntimeError):
            return False

    def _arrived(self, stream: int, until: int | None = None) -> None:
        """Mark a stream's work up to `until` (default: all) as done, and the work it waited for.

        Later joins come first, so that streams that wait for each other repeatedly are visited once.
        """
        reached: dict[int, int] = {}
        waiting = [(stream, self._clock if until is None else until)]
        while waiting:
            number, moment = waiting.pop()
            before = reached.get(number, -1)
            if moment > before:
                reached[number] = moment
                joins = self._joins.get(number, ())
                waiting += [(j.stream, j.until) for j in joins if before < j.serial <= moment]
        for flights in (self._downloads, self._uploads):
            for key, flight in list(flights.items()):
                if flight.serial <= reached.get(flight.stream, -1):
                    del flights[key]


@cache
def _signature(func: Any) -> tuple[tuple[str, ...], dict[str, Any]]:
    arguments = func._schema.arguments
    return tuple(argument.name for argument in arguments), {
        argument.name: argument.default_value if argument.has_default_value() else None
        for argument in arguments
    }


def sync_detector(emulation: Emulation | None, note: Note) -> SyncDetector | None:
    """Return a sync detector, or None without a device to synchronize with."""
    if emulation is None and not torch.cuda.is_available():
        return None
    return SyncDetector(emulation, note)


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
            shown: Any = warnings.showwarning

            def show(message: Any, *args: Any, **kwargs: Any) -> None:
                if _WORDS in str(message):
                    self.count += 1
                else:
                    shown(message, *args, **kwargs)

            warnings.showwarning = show
            cuda.set_sync_debug_mode("warn")
            try:
                yield
            finally:
                cuda.set_sync_debug_mode(before)
