"""Records a step: every operator that torch dispatches, and the lifetime of every storage."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch._C import DisableTorchFunctionSubclass, _current_autograd_node
from torch._C._autograd import _get_sequence_nr
from torch._C._profiler import _RecordFunctionFast
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode

from torchtrim.capture.collectives import Collectives, is_collective
from torchtrim.capture.functions import FunctionCalls
from torchtrim.capture.saved import RawUse, SavedTensors, type_name
from torchtrim.capture.waits import NOTHING, Origin, Ran, SyncChecks, sync_detector
from torchtrim.core.clock import queued_ns
from torchtrim.dispatch.frames import uncompiled
from torchtrim.dispatch.modes import (
    DROPOUT,
    call_operator,
    dropout_of,
    enter_below,
    fake_mode,
    has_own_dispatch,
    in_place,
    is_composite,
    is_random,
    leave,
    position_of,
    run_parts,
    written_arguments,
    written_tensors,
)
from torchtrim.dispatch.places import ENGINE, CallSite, Places, is_in_function, line_of
from torchtrim.dispatch.storages import PLAIN, Storages, is_lent, parts_of, reachable_tensors
from torchtrim.dryrun.meta_tensors import blanks
from torchtrim.dryrun.run import current as current_dry
from torchtrim.emulator.device import current
from torchtrim.records.profile import Call, Phase

MARK = "torchtrim::operator"
Cause = tuple[Phase, int, CallSite | None, CallSite | None, int]
"""Phase, module, innermost line, the user's line, and the forward operator."""

_SCALARS = frozenset((int, float, bool, str, type(None), torch.dtype, torch.device))


class RawOperator(NamedTuple):
    """A recorded operator, which `capture.build` turns into a `records.profile.Operator`."""

    func: Any
    phase: Phase
    module: int
    spot: CallSite | None
    caller: CallSite | None
    forward: int
    label: int
    inputs: list[RawUse]
    outputs: list[RawUse]
    mutates: tuple[int, ...]
    start_ns: int
    end_ns: int
    random: bool


class RawSync(NamedTuple):
    """A recorded host-device sync: its row in `syncs`, and its operator, or the call site of another call."""

    row: str
    operator: int
    phase: Phase = "other"
    spot: CallSite | None = None
    caller: CallSite | None = None


class FailedOperator(NamedTuple):
    """The last operator that raised while recording."""

    operator: str
    shapes: str
    phase: str
    spot: CallSite | None
    error: str
    live_bytes: int


class _RecordedSchema(NamedTuple):
    """Facts about an operator from its schema. `parts` runs a composite operator in parts.

    `random`: it may draw random numbers. `dropout`: the position of its dropout probability, or -1.
    """

    written: tuple[tuple[int, str], ...]
    is_label: bool
    lifts: bool
    checks: SyncChecks
    parts: Any
    exchanges: bool
    random: bool
    dropout: int

    def draws(self, args: Any, kwargs: dict[str, Any]) -> bool:
        """Return True if a call draws random numbers: one with a dropout of zero does not."""
        if not self.random or self.dropout < 0:
            return self.random
        return bool(dropout_of(self.dropout, args, kwargs))


class GradientSums:
    """The results that autograd would compute in place, were there no dispatch mode.

    The engine adds a further gradient of a tensor to the first one's memory if it has no other owner
    (`InputBuffer::accumulate`), and formulas write into zeros they made (`areAnyTensorSubclassLike` in
    FunctionsManual.cpp), but under a dispatch mode both make a further tensor. `found` has the bytes of each
    such result by its profiler range.
    """

    def __init__(self, storages: Storages) -> None:
        self.found: dict[int, int] = {}
        self._storages = storages
        self._node: tuple[int, int] = (-1, 0)
        self._open: tuple[int, int, int, int] | None = None

    def runs(self, node: Any, index: int) -> None:
        """Note the first operator of each node."""
        number = node._sequence_nr()
        if number != self._node[0]:
            self._node = number, index

    def opens(
        self, own: bool, index: int, mark: int, inputs: list[RawUse], outputs: list[RawUse]
    ) -> bool:
        """Return True if a result may be in place of its first input, whose death decides.

        `own`: that input is from the running node.
        """
        if len(inputs) < 2 or len(outputs) != 1:
            return False
        lives = self._storages.lives
        first, made = inputs[0][0], outputs[0][0]
        birth = lives[first].birth
        if birth < 0 or own is not (birth >= self._node[1]) or lives[made].birth != index:
            return False
        if lives[first].bytes != lives[made].bytes:
            return False
        self._open = index, mark, first, self._storages.live_bytes
        return True

    def settle(self) -> None:
        """Decide about the last sum: the engine has let the first gradient go, or somebody has it."""
        if self._open is None:
            return
        index, mark, first, level = self._open
        self._open = None
        life = self._storages.lives[first]
        if life.death == index + 1:
            self.found[mark] = life.bytes
            life.death = index  # as the result begins, which is in its place
        else:
            self._storages.peak_bytes = max(self._storages.peak_bytes, level)


class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """The dispatch mode that records between `start` and `stop`; callers set `phase` and `module`.

    `recomputing` is positive while a module's forward runs inside backward. `mark_operators` wraps each
    operator in a profiler range, so that allocator events can be assigned to operators
    (`capture.allocator`); `raised` holds the numbers of ranges whose operator raised. `look`, if given, is
    called with each operator's result, and with its arguments if it writes to them. `workspaces`: scratch
    bytes of each operator in a dry run. Count the bytes on `device`, or on all devices if it is empty.
    `saves`: read the tensors saved by autograd.
    """

    supports_higher_order_operators = True

    def __init__(
        self, places: Places, *, mark_operators: bool = False, device: str = "", saves: bool = True
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._emulation = current()
        self._fake = fake_mode()
        self.storages = Storages(device, self._is_pinned, self._is_lent)
        self.operators: list[RawOperator] = []
        self.calls: list[Call] = []
        self.labels: list[str] = []
        self.phase: Phase = "other"
        self.module = -1
        self.recomputing = 0
        self.failure: FailedOperator | None = None
        self.raised: list[int] = []
        self.start_ns = 0
        self.end_ns = 0
        self._places = places
        self.functions = FunctionCalls(places)
        self._saves = saves
        self._mark = profiler_range(MARK) if mark_operators else None
        self._pid = os.getpid()
        self._thread = threading.get_ident()
        self._lock = threading.Lock()
        self._sequence = 0
        self.makers: dict[int, int] = {}
        self.saved = SavedTensors(self.storages)
        self._open_labels: list[int] = []
        self.sums = GradientSums(self.storages)
        self._known: dict[int, _RecordedSchema] = {}
        self._undo = contextlib.ExitStack()
        self.syncs: list[RawSync] = []
        self.collectives = Collectives()
        self.look: Callable[[Any, Any], None] | None = None
        self.workspaces: list[int] = []
        self._dry = current_dry()
        self._call = self._emulation.accelerator.call if self._emulation else call_operator
        self._detector = sync_detector(self._emulation, self._synchronized)

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """False: to skip this mode, torch would import dynamo, which takes seconds. See `_SKIP`."""
        return False

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """True: compiled code runs compiled, as it would without the recorder."""
        return True

    def start(self, *, scan: bool = True) -> None:
        """Begin recording. `scan`: register all tensors that Python can reach."""
        if scan:
            self.track(reachable_tensors())
        self._watch_resizes()
        self._watch_states()
        if self._saves:
            self._watch_engine()
        if self._detector is not None:
            self._detector.watch(self._undo)
        self._sequence = _get_sequence_nr()
        self.start_ns = time.perf_counter_ns()
        if self._emulation is not None:
            leave(self._emulation.accelerator)
        enter_below(self)

    def stop(self) -> None:
        """End recording; live storages stay alive to the end of the step."""
        leave(self)
        if self._emulation is not None:
            enter_below(self._emulation.accelerator)
        self._undo.close()
        self.sums.settle()
        self.end_ns = time.perf_counter_ns()
        self.storages.end()

    def _watch_resizes(self) -> None:
        """Patch `UntypedStorage.resize_`, which is not dispatched."""
        original = torch.UntypedStorage.resize_

        def resize_(storage: Any, size: int) -> Any:
            result = original(storage, size)
            self.storages.resized(storage)
            return result

        torch.UntypedStorage.resize_ = resize_  # type: ignore[method-assign, assignment]
        self._undo.callback(setattr, torch.UntypedStorage, "resize_", original)

    def _watch_states(self) -> None:
        """Patch `torch.get_rng_state`, which is not dispatched: a checkpoint keeps its result."""
        original = torch.random.get_rng_state

        def get_rng_state() -> torch.Tensor:
            state = original()
            if threading.get_ident() == self._thread and os.getpid() == self._pid:
                self.storages.see(state, self.storages.clock)
            return state

        for owner in (torch, torch.random):
            owner.get_rng_state = get_rng_state  # type: ignore[attr-defined]
            self._undo.callback(setattr, owner, "get_rng_state", original)

    def _is_pinned(self, tensor: torch.Tensor) -> bool:
        if self._emulation is not None:
            return self._emulation.tags.is_pinned(tensor)
        with torch._C._DisableTorchDispatch():
            return tensor.is_pinned()

    def _is_lent(self, storage: Any) -> bool:
        return is_lent(storage) and not blanks().holds(storage.data_ptr())

    def _watch_engine(self) -> None:
        """Read autograd's saved tensors when backward begins."""
        original = torch.autograd.graph._engine_run_backward

        def run(outputs: Any, *args: Any, **kwargs: Any) -> Any:
            if threading.get_ident() != self._thread or os.getpid() != self._pid:
                return original(outputs, *args, **kwargs)
            self.saved.run_starts(outputs, len(self.operators))
            try:
                return original(outputs, *args, **kwargs)
            finally:
                self.saved.run_ends()

        for owner in (torch.autograd, torch.autograd.graph):
            owner._engine_run_backward = run  # type: ignore[attr-defined]
            self._undo.callback(setattr, owner, "_engine_run_backward", original)

    def _synchronized(self, row: str, operator: int) -> None:
        if threading.get_ident() == self._thread:
            site = (self.phase, *self._places.find(sys._getframe(1))) if operator < 0 else ()
            self.syncs.append(RawSync(row, operator, *site))

    def track(self, tensors: Iterable[torch.Tensor]) -> None:
        """Register tensors that were alive before the step."""
        for tensor in tensors:
            for part in parts_of(tensor):
                self.storages.see(part, -1)
        self.storages.note_peak()

    def name(self, tensor: torch.Tensor, kind: str, name: str) -> None:
        """Set the kind and name of a tensor's storage, such as the gradient of a parameter."""
        for part in parts_of(tensor):
            number = self.storages.number(part)
            if number >= 0:
                life = self.storages.lives[number]
                life.kind, life.name = kind, name

    def mark_of(self, operator: int) -> int:
        """Return the number of an operator's mark; operators that raised have marks too."""
        for number in sorted(self.raised):
            operator += number <= operator
        return operator

    def open_label(self, label: str) -> None:
        """Begin a range of `record_function`."""
        if label not in self.labels:
            self.labels.append(label)
        self._open_labels.append(self.labels.index(label))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        # Do not record in a forked process, or under a fake tensor mode entered since the start.
        elsewhere = os.getpid() != self._pid or fake_mode() is not self._fake
        if elsewhere or (types and any(map(has_own_dispatch, types))):
            runs = elsewhere or any(issubclass(kind, FakeTensor) for kind in types)
            return func(*args, **kwargs) if runs else NotImplemented
        known = self._known.get(id(func)) or self._know(func)
        if known.is_label:
            return self._label(func, args, kwargs)
        if known.parts is not None:
            with self:
                return known.parts(*args, **kwargs)
        before = len(self.operators) - 1
        self.sums.settle()
        self.storages.sweep()
        inputs = self._uses(args, before + known.lifts, "" if known.lifts else "input")
        if kwargs:
            inputs += self._uses(kwargs.values(), before, "input")
        node: Any = _current_autograd_node()
        frame = sys._getframe().f_back
        cause = self._cause(node, frame)
        own = self._writes_in_place(func, node, frame) if node is not None else None
        result, begin, end = self._run(func, args, kwargs)
        with self._lock:
            index = len(self.operators)
            self.storages.clock = index + 1
            mutates = self._mutated(known.written, args, kwargs) if known.written else ()
            outputs = self._uses((result,), index)
            if node is None:
                self.storages.keep(result)
            mark = index + len(self.raised)
            if own is None or not self.sums.opens(own, index, mark, inputs, outputs):
                self.storages.note_peak()
            if self._dry is not None:
                scratch = self._dry.take_workspace()
                # An emulated device has other kernels, whose scratch is unknown.
                self.workspaces.append(scratch if self._emulation is None else 0)
            label = self._open_labels[-1] if self._open_labels else -1
            self.operators.append(
                RawOperator(
                    *(func, *cause, label, inputs, outputs, mutates, begin, end),
                    known.draws(args, kwargs),
                )
            )
            self._own_nodes(index)
            if known.exchanges:
                self.collectives.ran(index, func, args, result, (begin, end))
            if self.look is not None:
                self.look(func, (result, args, kwargs) if known.written else result)
            if node is not None:
                self.saved.ran(node._sequence_nr(), index, inputs)
        detector, checks = self._detector, known.checks
        if detector is not None and (checks.rows or checks.copies or detector.listens(node)):
            ran = Ran(index, func, args, kwargs, result, known.written)
            detector.ran(ran, checks, node, self._origin)
        return result

    def _writes_in_place(self, func: Any, node: Any, frame: FrameType | None) -> bool | None:
        """Return `in_place` of an operator that the engine or a formula of C++ runs."""
        self.sums.runs(node, len(self.operators))
        return in_place(func, node) if frame is not None and frame.f_code is ENGINE else None

    def _origin(self, index: int, tensor: torch.Tensor) -> Origin:
        """Return how a tensor that an operator reads was created."""
        number = self.storages.number(tensor)
        birth = self.storages.lives[number].birth if number >= 0 else -1
        here = self.operators[index].spot
        if not 0 <= birth < index or here is None:
            return Origin.ELSEWHERE
        made = self.operators[birth].spot
        if made == here and self.operators[birth].func is torch.ops.aten.lift_fresh.default:
            return Origin.CALL
        if made is None or made[0] is not here[0] or line_of(made) != line_of(here):
            return Origin.ELSEWHERE
        return Origin.LINE

    def _cause(self, node: Any, frame: FrameType | None) -> Cause:
        if node is None:
            self.functions.ran(frame, len(self.operators))
            spot, caller = self._places.find(frame)
            return self.phase, self.module, spot, caller, -1
        forward = self.makers.get(node._sequence_nr(), -1)
        of = self.operators[forward] if forward >= 0 else None
        from_python = frame is not None and frame.f_code is not ENGINE
        spot, caller = self._places.find(frame) if from_python else (None, None)
        reruns = self.recomputing or (torch.is_grad_enabled() and not is_in_function(frame))
        if from_python and reruns:
            if of is not None and spot is None:
                spot, caller = of.spot, of.caller
            return "recompute", self.module, spot, caller, -1
        if from_python and self.phase == "optimizer":
            return "optimizer", self.module, spot, caller, -1
        if of is None:
            return "backward", self.module, spot, caller, -1
        return "backward", of.module, of.spot, of.caller, forward

    def _run(self, func: Any, args: Any, kwargs: Any) -> tuple[Any, int, int]:
        try:
            if self._mark is None:
                return self._timed(func, args, kwargs)
            with self._mark:
                return self._timed(func, args, kwargs)
        except BaseException as error:
            self._fail(func, args, kwargs, error)
            raise

    def _timed(self, func: Any, args: Any, kwargs: Any) -> tuple[Any, int, int]:
        """Return the result, the start time, and the end time less the time spent waiting for a core."""
        begin, queued = time.perf_counter_ns(), queued_ns()
        result = self._call(func, args, kwargs)
        return result, begin, max(time.perf_counter_ns() + queued - queued_ns(), begin)

    def _own_nodes(self, index: int) -> None:
        """Assign the autograd nodes created since the last operator to this one."""
        sequence = _get_sequence_nr()
        if sequence != self._sequence and threading.get_ident() == self._thread:
            for number in range(self._sequence, sequence):
                self.makers[number] = index
            self._sequence = sequence

    def _uses(self, values: Iterable[Any], birth: int, kind: str = "") -> list[RawUse]:
        """Return the tensors among the values; a new storage is born at `birth`."""
        uses: list[RawUse] = []
        see = self.storages.see
        for value in values:
            of = type(value)
            if of in PLAIN:
                number = see(value, birth, kind)
                if number >= 0 and not value.is_nested:
                    uses.append((number, value.dtype, value.shape, value.stride()))
                    continue
            elif of in _SCALARS:
                continue
            if isinstance(value, torch.Tensor):
                uses += self._uses_of_parts(value, birth, kind)
            elif isinstance(value, (list, tuple)):
                uses += self._uses(value, birth, kind)
        return uses

    def _uses_of_parts(self, tensor: torch.Tensor, birth: int, kind: str) -> list[RawUse]:
        uses: list[RawUse] = []
        with DisableTorchFunctionSubclass():
            for part in parts_of(tensor):
                if (number := self.storages.see(part, birth, kind)) < 0:
                    continue
                try:
                    uses.append((number, part.dtype, part.shape, part.stride()))
                except RuntimeError:
                    uses.append((number, part.dtype, (), ()))
        return uses

    def _know(self, func: Any) -> _RecordedSchema:
        known = self._known[id(func)] = _RecordedSchema(
            written_arguments(func),
            getattr(func, "namespace", "") == "profiler",
            func is torch.ops.aten.lift_fresh.default,
            self._detector.checks(func) if self._detector is not None else NOTHING,
            self._parts_of(func),
            is_collective(func),
            is_random(func),
            position_of(func, DROPOUT),
        )
        return known

    def _parts_of(self, func: Any) -> Any:
        if self._emulation is not None:
            return self._emulation.accelerator.parts_of(func)
        if not is_composite(func):
            return None
        return lambda *args, **kwargs: run_parts(func, args, kwargs)

    def _mutated(self, written: Any, args: Any, kwargs: Any) -> tuple[int, ...]:
        """Return the storages that an operator wrote, and maybe resized."""
        tensors = written_tensors(written, args, kwargs)
        numbers = dict.fromkeys(self.storages.settle(p) for one in tensors for p in parts_of(one))
        numbers.pop(-1, None)
        return tuple(numbers)

    def _label(self, func: Any, args: Any, kwargs: Any) -> Any:
        if "enter" in func.__name__ and args:
            self.open_label(str(args[0]))
        elif "exit" in func.__name__ and self._open_labels:
            self._open_labels.pop()
        return func(*args, **kwargs)

    def _fail(self, func: Any, args: Any, kwargs: Any, error: BaseException) -> None:
        if self._mark is not None:
            self.raised.append(len(self.operators) + len(self.raised))
        shapes = ", ".join(
            f"{type_name(dtype)}{list(shape)}"
            for _, dtype, shape, _ in self._uses((*args, *kwargs.values()), -1)
        )
        spot, caller = self._places.find(sys._getframe(2))
        self.failure = FailedOperator(
            str(func), shapes, self.phase, caller or spot, str(error), self.storages.live_bytes
        )


def profiler_range(name: str) -> Any:
    """Return a reusable profiler range in the user scope."""
    return _RecordFunctionFast(name, (), {"scope": "user_scope"})


uncompiled(Recorder.__torch_dispatch__)
