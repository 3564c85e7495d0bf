"""Orders of the work on emulated streams: early, as late as allowed, or at random.

A GPU may run a stream's work at any time after it was queued and after the work it waits for, so a correct
program is correct under every such order. With `late`, work on a side stream reads its sources only when work
that waits for it needs its results; until then, its results and memory freed meanwhile are poisoned. With
`early`, work does not see results that its stream has not waited for. `random` mixes both.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch.utils._pytree import tree_map, tree_map_only

from torchtrim.dispatch.calls import stream_number
from torchtrim.dispatch.modes import tensors_among, written_arguments, written_tensors
from torchtrim.dispatch.storages import PLAIN
from torchtrim.emulator.clocks import (
    WHOLE,
    Access,
    ByteRange,
    Clocks,
    Pending,
    Race,
    StorageCell,
    TensorPlace,
    Use,
    copy_of,
    poison,
    shape_of,
    unowned,
)
from torchtrim.emulator.clocks import alias as alias_in
from torchtrim.emulator.tags import Tags
from torchtrim.errors import UsageError

KINDS = ("early", "late", "random")
_WAITING = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape, torch.Tag.inplace_view)
_MAIN = 0  # The number of the default stream.
_CHANCE = 0.5  # Arbitrary: probability that a random order runs or defers work.
Run = Callable[[Any, Any, dict[str, Any]], Any]


class StreamOrder(NamedTuple):
    """An order of stream work: one of `KINDS`, and the seed of a random order."""

    kind: str
    seed: int = 0

    @classmethod
    def parse(cls, text: str) -> StreamOrder:
        """Parse `early`, `late`, `random` or `random:7`. Raises `UsageError`."""
        kind, colon, seed = text.partition(":")
        if kind not in KINDS or (colon and (kind != "random" or not seed.isdecimal())):
            raise UsageError(
                f"--streams {text}: expected early, late, random, or random:SEED with an integer."
            )
        return cls(kind, int(seed or 0))


class _Traits(NamedTuple):
    """Properties of an operator from its schema.

    `written`: positions and names of mutated arguments. `returned`: those that it returns. `mixed`: it
    mutates arguments and also returns new tensors or draws random numbers.
    """

    copies: bool
    view: bool
    waits: bool
    empty: bool
    random: bool
    written: tuple[tuple[int, str], ...]
    returned: tuple[tuple[int, str], ...]
    mixed: bool


class _DeviceCall(NamedTuple):
    """An operator about to run on the device. `down`: its result is on the host."""

    func: Any
    args: Any
    kwargs: dict[str, Any]
    down: bool
    traits: _Traits

    def tensors(self) -> list[torch.Tensor]:
        return [*tensors_among((*self.args, *self.kwargs.values()))]

    def written(self) -> list[torch.Tensor]:
        return [*written_tensors(self.traits.written, self.args, self.kwargs)]


class Orders:
    """Runs the operators of an emulated device in an order that its streams allow.

    Gets events and waits as a `dispatch.calls.Hearer`. `clocks` detects races, even with correct values.
    """

    def __init__(self, order: StreamOrder, tags: Tags) -> None:
        self.kind = order.kind
        self.clocks = Clocks(tags.holds)
        self._tags = tags
        self._random = random.Random(order.seed)
        self._pending = Pending()
        self._marks: WeakKeyDictionary[Any, tuple[int, int]] = WeakKeyDictionary()
        self._traits: dict[Any, _Traits] = {}

    def races(self) -> list[Race]:
        """Return the races since the last call."""
        races, self.clocks.races = self.clocks.races, []
        return races

    def run(self, run: Run, func: Any, args: Any, kwargs: dict[str, Any], *, down: bool) -> Any:
        """Run an operator of the device, now or later. `down`: its result is on the host."""
        traits = self._traits.get(func) or self._know(func)
        if traits.copies and traits.written:
            down = not self._tags.on_device(args[0])
        call = _DeviceCall(func, args, kwargs, down, traits)
        if call.traits.view:
            return run(func, args, kwargs)
        stream = stream_number()
        self._pending.catch_up(stream)
        self._pending.let_go(lambda cell: self._is_lost(cell, stream))
        access = self.clocks.issue(stream)
        if not all(map(_is_plain, call.tensors())) or self._host_waits(call):
            self.synchronized("", stream)
            result = self._now(run, call, access)
            self.clocks.synchronized(stream)
        elif self._is_deferred(call, stream):
            result = self._later(run, call, access)
        else:
            result = self._now(run, call, access)
        self._go_on()
        return result

    def keep(self, tensor: torch.Tensor, stream: Any) -> None:
        """`record_stream`."""
        self.clocks.watched(tensor.untyped_storage()).kept.add(stream_number(stream))

    def synchronized(self, row: str, subject: Any) -> None:
        """Record that the host waited for a stream (or its number), an event or all, or found it done."""
        if subject is None:
            for stream in list(self._pending.queues):
                self._pending.complete(stream)
        elif isinstance(subject, int) or hasattr(subject, "stream_id"):
            subject = subject if isinstance(subject, int) else stream_number(subject)
            self._pending.complete(subject)
        elif subject in self._marks:
            self._pending.complete(*self._marks[subject])
        self.clocks.synchronized(subject)

    def event_recorded(self, event: Any, stream: int) -> None:
        """Record an event after all work that a stream has queued."""
        self._marks[event] = (stream, self.clocks.serial(stream))
        self.clocks.recorded(event, stream)

    def event_awaited(self, event: Any, stream: int) -> None:
        """Order a stream's further work after an event."""
        if event in self._marks:
            self._pending.behind(stream, *self._marks[event])
            self.clocks.awaited(event, stream)

    def host_read(self, tensor: torch.Tensor) -> None:
        """Record that the host reads its memory without a wait."""

    def _host_waits(self, call: _DeviceCall) -> bool:
        traits = call.traits
        if not traits.copies:
            return traits.waits or call.down or traits.mixed
        new = not traits.written
        positional = not new and len(call.args) > 2 and call.args[2]
        if not (call.kwargs.get("non_blocking") or positional):
            return call.down or not self._tags.on_device(call.args[0 if new else 1])
        return call.down and not (new or self._tags.is_pinned(call.args[0]))

    def _is_deferred(self, call: _DeviceCall, stream: int) -> bool:
        """Return True if work is queued. Work of the main stream is queued only if it writes to the host."""
        if stream == _MAIN and not call.down:
            if self._pending.uses(stream, call.tensors()):
                self._pending.complete(stream)
            return False
        if self.kind == "early" or self._pending.queues[stream]:
            return self.kind != "early"
        return self.kind == "late" or self._random.random() < _CHANCE

    def _now(self, run: Run, call: _DeviceCall, access: Access) -> Any:
        early = self._note_reads(call, access)
        args, kwargs = call.args, call.kwargs
        by_chance = self.kind == "random"
        if early and (self._random.random() < _CHANCE if by_chance else self.kind == "early"):
            written = {id(tensor) for tensor in call.written()}
            args, kwargs = tree_map(lambda leaf: _unseen(leaf, early, written), (args, kwargs))
        result = run(call.func, args, kwargs)
        self._note_writes(call, result, access)
        if call.traits.empty:
            for tensor in filter(_is_plain, tensors_among((result,))):
                poison(tensor)
        return result

    def _later(self, run: Run, call: _DeviceCall, access: Access) -> Any:
        """Return stand-in outputs of an operator, and queue it."""
        func = call.func  # the closure must not keep the call's tensors alive
        generator = call.kwargs.get("generator") or torch.default_generator
        drawn = generator.get_state() if call.traits.random else None
        args, kwargs = self._staged(call, access.stream)
        try:
            result, made = self._promised(run, call)
        except (IndexError, RuntimeError):
            self.synchronized("", access.stream)
            return self._now(run, call, access)
        self._note_reads(call, access)
        self._note_writes(call, result, access)
        places = self._pending.placed((args, kwargs))
        targets = self._pending.placed(made)

        def do() -> None:
            own_args, own_kwargs = tree_map_only(TensorPlace, TensorPlace.tensor, places)
            with _drawing(generator, drawn):
                results = tensors_among((func(*own_args, **own_kwargs),))
            for target, value in zip(targets, results, strict=False):
                target.tensor().copy_(value)

        self._pending.add(access.stream, access.serial, do, (places, targets))
        return result

    def _staged(self, call: _DeviceCall, stream: int) -> tuple[Any, dict[str, Any]]:
        """Return the arguments, with sources of copies that are read at once replaced by copies.

        These are pageable host memory, and sources on the main stream, whose further work runs at once.
        """
        if not call.traits.copies:
            return call.args, call.kwargs
        at = 1 if call.traits.written else 0
        source = call.args[at]
        pageable = not self._tags.on_device(source) and not self._tags.is_pinned(source)
        if not pageable and stream != _MAIN:
            return call.args, call.kwargs
        with unowned():
            source = source.detach().clone()
        return (*call.args[:at], source, *call.args[at + 1 :]), call.kwargs

    def _promised(self, run: Run, call: _DeviceCall) -> tuple[Any, list[torch.Tensor]]:
        """Return the stand-in outputs of an operator, and the new tensors among them."""
        traits = call.traits
        if traits.written:
            values = tuple(written_tensors(traits.returned, call.args, call.kwargs))
            return (values[0] if len(values) == 1 else values or None), []
        result = run(call.func, call.args, call.kwargs)
        made = [*tensors_among((result,))]
        for tensor in made:
            poison(tensor)
        return result, made

    def _is_lost(self, cell: StorageCell, stream: int) -> bool | None:
        """Return True if freed memory may already be reused, now that `stream` continues."""
        if not self._tags.holds(cell.storage):
            return False
        watched = self.clocks.watched(cell.storage)
        home = watched.home
        for other in +cell.pending:
            known = other == home or other in watched.kept
            if not known and not self.clocks.has_seen(home, other, cell.last[other]):
                return True if home == stream else None
        return False

    def _go_on(self) -> None:
        waiting = [number for number, queue in self._pending.queues.items() if queue]
        if self.kind == "random" and waiting and self._random.random() < _CHANCE:
            stream = self._random.choice(waiting)
            queue = self._pending.queues[stream]
            self._pending.complete(stream, self._random.choice(queue).serial)

    def _note_reads(self, call: _DeviceCall, access: Access) -> list[int]:
        if call.traits.empty:
            return []
        skipped = {id(t) for t in call.written()} if call.traits.copies else set()
        read = (tensor for tensor in call.tensors() if id(tensor) not in skipped)
        return self.clocks.read(self._shared(read), access)

    def _note_writes(self, call: _DeviceCall, result: Any, access: Access) -> None:
        written = call.written()
        self.clocks.write(self._shared(written), access)
        if not written:
            made = (new.untyped_storage() for new in tensors_among((result,)) if _is_plain(new))
            self.clocks.make(made, access, on_device=not call.down)

    def _shared(self, tensors: Iterable[torch.Tensor]) -> list[Use]:
        """Return the ranges that streams share: device storages, and ranges of pinned host blocks."""
        uses: dict[tuple[int, ByteRange], Use] = {}
        for tensor in filter(_is_plain, tensors):
            storage, on = tensor.untyped_storage(), self._tags.on_device(tensor)
            if on or self._tags.is_pinned(tensor):
                span = WHOLE if on else _span_of(tensor)
                uses[storage._cdata, span] = Use(storage, span)
        return list(uses.values())

    def _know(self, func: Any) -> _Traits:
        name = func.name().partition(".")[0]
        arguments, returns = func._schema.arguments, func._schema.returns
        written = written_arguments(func)
        returned = tuple(
            (at, name)
            for info in (result.alias_info for result in returns)
            for at, name in written
            if info and info.before_set & arguments[at].alias_info.before_set
        )
        is_random = torch.Tag.nondeterministic_seeded in func.tags
        traits = _Traits(
            copies=name in ("aten::copy_", "aten::_to_copy"),
            view=func.is_view or name == "aten::set_",
            waits=any(tag in func.tags for tag in _WAITING),
            empty=name.startswith(("aten::empty", "aten::new_empty")),
            random=is_random,
            written=written,
            returned=returned,
            mixed=bool(written) and (is_random or len(returned) != len(returns)),
        )
        self._traits[func] = traits
        return traits


def _is_plain(tensor: torch.Tensor) -> bool:
    if type(tensor) not in PLAIN or tensor.layout is not torch.strided or tensor.is_nested:
        return False
    return not (tensor.is_meta or tensor.is_conj() or tensor.is_neg())


def _span_of(tensor: torch.Tensor) -> ByteRange:
    if not tensor.numel():
        return 0, 0
    first, size = tensor.storage_offset(), tensor.element_size()
    reach = sum((n - 1) * by for n, by in zip(tensor.shape, tensor.stride(), strict=True))
    return int(first) * size, int(first + reach + 1) * size


def _unseen(value: Any, early: list[int], written: set[int]) -> Any:
    """Return a poisoned copy of a tensor that is not ready, and any other value itself."""
    if not isinstance(value, torch.Tensor) or id(value) in written:
        return value
    storage = value.untyped_storage()
    if storage._cdata not in early:
        return value
    with unowned():
        return alias_in(copy_of(storage, poisoned=True), shape_of(value))


@contextlib.contextmanager
def _drawing(generator: torch.Generator, state: Any) -> Iterator[None]:
    """Draw random numbers from the state at the time the work was queued."""
    if state is None:
        yield
        return
    now = generator.get_state()
    generator.set_state(state)
    try:
        yield
    finally:
        generator.set_state(now)
