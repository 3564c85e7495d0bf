"""Records what a step does: every operator as torch dispatches it, and the life of every storage."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch._C import _current_autograd_node
from torch._C._autograd import _get_sequence_nr
from torch._C._profiler import _RecordFunctionFast
from torch.utils._python_dispatch import TorchDispatchMode

from torchtrim.observe.places import Places, Spot
from torchtrim.observe.storages import Storages, reachable_tensors
from torchtrim.records.profile import Phase

MARK = "torchtrim::operator"
Use = tuple[int, torch.dtype, tuple[int, ...], tuple[int, ...]]


class RawOperator(NamedTuple):
    """An operator as recorded; `observe.build` makes it a `records.profile.Operator`."""

    func: Any
    phase: Phase
    module: int
    spot: Spot | None
    caller: Spot | None
    label: int
    forward: int
    inputs: list[Use]
    outputs: list[Use]
    mutates: tuple[int, ...]
    start_ns: int
    end_ns: int


class RawCall(NamedTuple):
    """A forward call of a module, as recorded."""

    module: int
    first: int
    last: int
    depth: int
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    graded: bool


class Failure(NamedTuple):
    """The operator that raised while the recorder ran."""

    operator: str
    shapes: str
    phase: str
    spot: Spot | None
    error: str
    live_bytes: int


class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records between `start` and `stop`; `phase` and the stack of modules are told from outside.

    `mark_operators` wraps each operator in a profiler range, so that a profiler that runs at the same
    time can cut the allocator's events at operators (`observe.allocator`).
    """

    def __init__(self, places: Places, *, mark_operators: bool = False) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.storages = Storages()
        self.operators: list[RawOperator] = []
        self.calls: list[RawCall] = []
        self.labels: list[str] = []
        self.phase: Phase = "other"
        self.module = -1
        self.failure: Failure | None = None
        self.start_ns = 0
        self.end_ns = 0
        self._places = places
        self._mark = mark_operators
        self._pid = os.getpid()
        self._thread = threading.get_ident()
        self._sequence = 0
        self._makers: dict[int, int] = {}
        self._open_labels: list[int] = []
        self._mutated: dict[Any, tuple[tuple[int, str], ...]] = {}

    def start(self, *, scan: bool = True) -> None:
        """Register what is alive (`scan`: all that Python reaches) and begin."""
        if scan:
            self.track(reachable_tensors())
        self._sequence = _get_sequence_nr()
        self.start_ns = time.perf_counter_ns()
        self.__enter__()  # type: ignore[no-untyped-call]

    def stop(self) -> None:
        """End the recording; storages that live are alive at the end of the step."""
        self.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        self.end_ns = time.perf_counter_ns()
        self.storages.note_peak()

    def track(self, tensors: Iterable[torch.Tensor]) -> None:
        """Register tensors that were alive before the step."""
        for tensor in tensors:
            self.storages.see(tensor, -1)
        self.storages.note_peak()

    def name(self, tensor: torch.Tensor, kind: str, name: str) -> None:
        """Say what a tensor's storage is, such as the gradient of a parameter."""
        number = self.storages.number(tensor)
        if number >= 0:
            life = self.storages.lives[number]
            life.kind, life.name = kind, name

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if os.getpid() != self._pid:
            return func(*args, **kwargs)
        index = len(self.operators)
        inputs = self._uses(args, index - 1)
        if kwargs:
            inputs += self._uses(kwargs.values(), index - 1)
        node = _current_autograd_node()
        recomputes = node is not None and self.module >= 0
        forward = -1
        if node is not None and not recomputes:
            forward = self._makers.get(node._sequence_nr(), -1)
        result, begin, end = self._run(func, args, kwargs)
        self.storages.clock = index + 1
        outputs = self._uses((result,), index)
        self.storages.note_peak()
        spot = caller = None
        if forward >= 0:
            spot, caller = self.operators[forward][3:5]
        elif node is None or recomputes:
            spot, caller = self._places.find(sys._getframe(1))
        if func.namespace == "profiler":
            self._label(func, args)
        self.operators.append(
            RawOperator(
                func,
                self.phase if node is None else "recompute" if recomputes else "backward",
                self.operators[forward].module if forward >= 0 else self.module,
                spot,
                caller,
                self._open_labels[-1] if self._open_labels else -1,
                forward,
                inputs,
                outputs,
                self._mutates(func, args, kwargs),
                begin,
                end,
            )
        )
        if threading.get_ident() == self._thread:
            self._own_nodes(index)
        return result

    def _run(self, func: Any, args: Any, kwargs: Any) -> tuple[Any, int, int]:
        try:
            if self._mark:
                with _RecordFunctionFast(MARK):
                    begin = time.perf_counter_ns()
                    result = func(*args, **kwargs)
                    return result, begin, time.perf_counter_ns()
            begin = time.perf_counter_ns()
            result = func(*args, **kwargs)
            return result, begin, time.perf_counter_ns()
        except Exception as error:
            self._fail(func, args, kwargs, error)
            raise

    def _own_nodes(self, index: int) -> None:
        """The autograd nodes made since the last operator are this one's."""
        sequence = _get_sequence_nr()
        for number in range(self._sequence, sequence):
            self._makers[number] = index
        self._sequence = sequence

    def _uses(self, values: Any, birth: int) -> list[Use]:
        """Tensors among the values; a storage that was never seen is born at `birth`."""
        uses: list[Use] = []
        for value in values:
            if isinstance(value, torch.Tensor):
                number = self.storages.see(value, birth)
                if number >= 0:
                    uses.append((number, value.dtype, value.shape, value.stride()))
            elif isinstance(value, (list, tuple)):
                uses += self._uses(value, birth)
        return uses

    def _mutates(self, func: Any, args: Any, kwargs: Any) -> tuple[int, ...]:
        written = self._mutated.get(func)
        if written is None:
            written = self._mutated[func] = _written_arguments(func)
        if not written:
            return ()
        values = [
            args[position] if position < len(args) else kwargs.get(name)
            for position, name in written
        ]
        return tuple(number for number, *_ in self._uses(values, -1))

    def _label(self, func: Any, args: Any) -> None:
        if "enter" in func.__name__ and args:
            self.labels.append(str(args[0]))
            self._open_labels.append(len(self.labels) - 1)
        elif "exit" in func.__name__ and self._open_labels:
            self._open_labels.pop()

    def _fail(self, func: Any, args: Any, kwargs: Any, error: Exception) -> None:
        if self.failure is not None:
            return
        shapes = ", ".join(
            f"{str(dtype).removeprefix('torch.')}{list(shape)}"
            for _, dtype, shape, _ in self._uses((*args, *kwargs.values()), -1)
        )
        spot, caller = self._places.find(sys._getframe(2))
        self.failure = Failure(
            str(func), shapes, self.phase, caller or spot, str(error), self.storages.live_bytes
        )


def _written_arguments(func: Any) -> tuple[tuple[int, str], ...]:
    schema = func._schema
    return tuple(
        (position, argument.name)
        for position, argument in enumerate(schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    )
