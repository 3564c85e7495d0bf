"""Watches for a recorder where the host waits: operators, calls that are none, and CUDA's own count."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from enum import Enum
from typing import Any, NamedTuple

import torch

from torchtrim.capture.debug_mode import SyncCounter
from torchtrim.capture.waits import RawSync, Waits, is_copy, rows_of
from torchtrim.dispatch.calls import heard_by, watch_device, watch_prints
from torchtrim.dispatch.modes import tensors_among
from torchtrim.emulator.device import Emulation
from torchtrim.emulator.orders import Orders
from torchtrim.syncs.base import Row


class Ran(NamedTuple):
    """An operator that has run; `written` are the positions of the arguments that it wrote to."""

    number: int
    func: Any
    args: Any
    kwargs: Any
    result: Any
    written: tuple[tuple[int, str], ...]


class Asking(NamedTuple):
    """What an operator is to be asked: the table's rows, and whether it copies between devices."""

    rows: tuple[Row, ...]
    copies: bool
    indexes: bool


NOTHING = Asking((), False, False)
_INDEXING = ("aten::index", "aten::index_put", "aten::index_put_")


class Origin(Enum):
    """What made a tensor of the host that an operator reads: the very call, its line, or another."""

    CALL = 1
    LINE = 2
    ELSEWHERE = 3


FindsOrigin = Callable[[int, torch.Tensor], Origin]
"""By the number of an operator and a tensor that it reads."""


class Waiting:
    """Told of each operator that ran (`ran`), it tells `note` of each wait."""

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
        """Hear of calls that are no operators, until `undo` is closed. An emulated device tells them."""

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
        """What to ask an operator each time."""
        indexes = func.name().partition(".")[0] in _INDEXING
        return Asking(rows_of(func), is_copy(func), indexes)

    def listens(self, node: Any) -> bool:
        """Whether it wants to hear of an operator of which there is nothing to ask."""
        new = node is not None and node is not self._node
        return (
            new or self._orders is not None or self._counter is not None or self._waits.in_flight()
        )

    def ran(self, ran: Ran, asking: Asking, node: Any, origin: FindsOrigin) -> None:
        """An operator has run, in backward for a node of autograd."""
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
        """Races that the operator shows: its own, or one that ran earlier and is to be changed."""
        last = orders.clocks.last
        if last is not None and last.operator < 0:
            last.operator = number
        for race in orders.races():
            if race.access.operator >= 0:
                self._note(RawSync(race.row, race.access.operator))

    def _lists(self, ran: Ran, origin: FindsOrigin) -> Iterator[torch.Tensor]:
        """Indices that the call made of a list: on a device torch makes them there."""
        is_on_device = self._waits.is_on_device
        if not is_on_device(ran.args[0]):
            return
        for index in ran.args[1]:
            made_here = index is not None and index.numel() and not is_on_device(index)
            if made_here and origin(ran.number, index) is Origin.CALL:
                yield index


def waiting_here(emulation: Emulation | None, note: Callable[[RawSync], None]) -> Waiting | None:
    """None where there is no device to synchronize with."""
    there = emulation is not None or torch.cuda.is_available()
    return Waiting(emulation, note) if there else None
