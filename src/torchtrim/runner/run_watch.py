"""Watches the steps of a planned run: their number, time and peak, and what they assume."""

from __future__ import annotations

import contextlib
import os
import re
import statistics
import threading
import weakref
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.compiler import is_dynamo_compiling
from torch.optim.optimizer import register_optimizer_step_post_hook

from torchtrim.capture.recording import tensors_in
from torchtrim.capture.steps import Steps
from torchtrim.core.clock import now
from torchtrim.core.isolation import isolated
from torchtrim.core.units import format_bytes
from torchtrim.core.words import listed
from torchtrim.errors import ApplyFailed
from torchtrim.evidence.evidence import autocast_now, kind_of
from torchtrim.executor import notices
from torchtrim.executor.swap import Forward, Swapped
from torchtrim.records.plan import Plan
from torchtrim.runner.run_peak import PeakMeter, meter_for

REPORT = "report of the run"
_KEPT = 1024
"""Recent steps whose median is the time of a step."""
_MOST_KNOWN = 256
"""Arbitrary: bounds the memory for a script with ever new shapes."""


class Notice(NamedTuple):
    """An assumption that a step did not meet at a place."""

    step: int
    where: str
    said: str


class RunWatch:
    """Watch of a planned run, by the calls of its roots and the steps of its optimizers.

    A plan of calls has calls for steps. `told` gets a line when inputs first differ from the certified ones,
    and one for the first peak of a plan for another device.
    """

    def __init__(self, plan: Plan, told: Callable[[str], None]) -> None:
        self.steps = 0
        self.device = ""
        self.inputs = InputCheck(plan, told)
        self.notices: list[Notice] = []
        self.peak = PeakMeter("not measured: the plan's models never ran")
        self._plan = plan
        self._told = told
        self._seconds: deque[float] = deque(maxlen=_KEPT)
        self._optimizers: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        self._names: weakref.WeakKeyDictionary[nn.Module, str] = weakref.WeakKeyDictionary()
        self._cycle: Steps | None = None
        self._began: float | None = None
        self._stepped = 0.0
        self._inside = self._is_over = self._has_optimizer = self._has_compared = False
        self._here = os.getpid(), threading.get_ident()
        self._undo = contextlib.ExitStack()

    @property
    def seconds(self) -> float | None:
        """Median time of a step, None if no step was timed."""
        return statistics.median(self._seconds) if self._seconds else None

    def begin(self, optimizers: int) -> None:
        """Begin to watch a script with this many optimizers."""
        self._has_optimizer = optimizers > 0
        self._cycle = Steps(max(optimizers, 1))
        if not self._plan.compiled:  # compiled, a step may run no hook
            self._undo.callback(register_optimizer_step_post_hook(self.optimizer_ends).remove)
        notices.listeners.append(self._noticed)
        self._undo.callback(notices.listeners.remove, self._noticed)

    def watch(self, name: str, root: nn.Module) -> None:
        """Watch the calls of a root in this thread, unless TorchScript has compiled it."""
        self._here = os.getpid(), threading.get_ident()
        if not self.device and (parameter := next(root.parameters(), None)) is not None:
            self.device = str(parameter.device)
            self.peak = meter_for(parameter.device, self._plan.memory_kind)
        self._names[root] = name
        if root._compiled_call_impl is not None:
            root._compiled_call_impl = partial(self._call, name, root._compiled_call_impl)
            return
        with contextlib.suppress(ApplyFailed):
            Swapped(root, lambda forward: partial(self._call, name, forward))

    def end(self) -> None:
        """Stop watching. The last step is complete if its optimizers have stepped."""
        if self._is_over:
            return
        if self._began is not None and (self._plan.is_of_calls or self._is_stepped):
            self._step_ends((self._stepped or now()) - self._began)
        self._close()

    def _close(self) -> None:
        self._is_over = True
        self.peak.close()
        self._undo.close()

    @property
    def is_by_hand(self) -> bool:
        """True for a script that has trained without an optimizer, whose steps are not counted."""
        trains = self._began is not None and not self._plan.is_of_calls
        return trains and not (self._has_optimizer or self._stepped)

    @property
    def _is_stepped(self) -> bool:
        return self._cycle is not None and self._cycle.dirty

    def _is_here(self) -> bool:
        return not self._is_over and (os.getpid(), threading.get_ident()) == self._here

    def called(self, root: nn.Module, compiled: Forward, args: Any, kwargs: Any) -> Any:
        """Call a compiled function that computes a root's forward."""
        return self._call(self._names.get(root, ""), compiled, *args, **kwargs)

    def _call(self, name: str, forward: Forward, /, *args: Any, **kwargs: Any) -> Any:
        if is_dynamo_compiling():  # what compiles the root's caller is watched in its place
            return forward(*args, **kwargs)
        again = torch._C._current_autograd_node() is not None
        if self._inside or again or not self._is_here():
            return forward(*args, **kwargs)
        self._inside = True
        try:
            self._look(name, args, kwargs)
            return forward(*args, **kwargs)
        finally:
            self._inside = False

    def _look(self, name: str, args: Any, kwargs: Any) -> None:
        """Note a call; a defect here ends the watch, never the script."""
        done = False
        with isolated("renderer", REPORT):
            if self._plan.is_of_calls or torch.is_grad_enabled():
                self._step_runs()
                self.inputs.see(name, args, kwargs, self.steps + 1)
            elif self._is_stepped:
                self.peak.pauses()
            done = True
        if not done:
            self._close()

    def _step_runs(self) -> None:
        """Note a call that belongs to the current step or begins the next one."""
        if self._began is not None and (self._plan.is_of_calls or self._next_begins()):
            self._step_ends(now() - self._began)
            self._began = None
        if self._began is None:
            self.peak.begins()
            self._began = now()

    def _next_begins(self) -> bool:
        return self._cycle is not None and self._cycle.forward()

    def _step_ends(self, took: float) -> None:
        self.steps += 1
        measured = self.peak.ends(self.steps)
        self._compare_peak()
        if self.steps > 1 and not measured:
            self._seconds.append(took)

    def _compare_peak(self) -> None:
        """Tell the first measured peak beside the prediction, if that is for another device."""
        predicted, peak = self._plan.predicted, self.peak.bytes
        is_here = predicted.device.partition(":")[0] in ("", self.device.partition(":")[0])
        if self._has_compared or peak is None or is_here or not predicted.peak_bytes:
            return
        self._has_compared = True
        off = peak / predicted.peak_bytes - 1
        self._told(
            f"step {self.steps} on {self.device}: peak {format_bytes(peak)}, {off:+.1%} against the "
            f"{format_bytes(predicted.peak_bytes)} predicted on {predicted.device}"
        )

    def optimizer_ends(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """Note that an optimizer has stepped."""
        if self._is_here() and self._cycle is not None:
            self._stepped = now()
            number = self._optimizers.setdefault(optimizer, len(self._optimizers))
            self._cycle.stepped(number, in_backward=torch._C._current_autograd_node() is not None)

    def _noticed(self, where: str, said: str) -> None:
        self.notices.append(Notice(self.steps + 1, where, said))


class InputCheck:
    """Compares the inputs of roots with the certified ones.

    `compares`: all certified inputs are known. `others` describes other inputs, and `other_steps` counts the
    steps that had some.
    """

    def __init__(self, plan: Plan, told: Callable[[str], None]) -> None:
        proof = plan.certified
        self._certified = proof.inputs if proof is not None and proof.complete else ()
        self.compares = bool(self._certified)
        self.others: list[str] = []
        self.other_steps = 0
        self._told = told
        self._known: dict[Any, bool] = {}
        self._last = 0

    def see(self, name: str, args: Any, kwargs: Any, step: int) -> None:
        """Check the inputs of a call, and tell of the first ones that are not certified."""
        if not self.compares:
            return
        tensors, autocast = list(tensors_in((args, kwargs))), autocast_now()
        key = name, autocast, tuple((tensor.shape, tensor.dtype) for tensor in tensors)
        if (known := self._known.get(key)) is None:
            inputs = ", ".join((*map(kind_of, tensors), *autocast)) or "no tensor"
            known = f"{name}: {inputs}" in self._certified
            if len(self._known) < _MOST_KNOWN:
                self._known[key] = known
                if not known:
                    self._note(name, inputs, step)
        if not known and self._last != step:
            self._last, self.other_steps = step, self.other_steps + 1

    def _note(self, name: str, inputs: str, step: int) -> None:
        start = f"{name}: "
        certified = [one.removeprefix(start) for one in self._certified if one.startswith(start)]
        self.others.append(_difference(name, inputs, certified, step))
        if len(self.others) == 1:
            self._told(self.others[0])


_KIND = re.compile(r"(\w+)\[([^\]]*)\]")


def _difference(name: str, inputs: str, certified: list[str], step: int) -> str:
    """Describe inputs that differ from certified ones: by autocast or the batch, if only that differs."""
    now, (rest, *_) = _autocast_of(inputs), _AUTOCAST.split(inputs)
    then = {_autocast_of(one) for one in certified if _AUTOCAST.split(one)[0] == rest}
    if then and now not in then:
        return f"{now} from step {step}: certified with {listed(sorted(then))}"
    batch, known_batches = _batch_of(inputs), [_batch_of(one) for one in certified]
    if batch is not None and known_batches:
        sizes = {one.size for one in known_batches if one is not None and one.rest == batch.rest}
        if len(sizes) == len({*certified}):
            return (
                f"batch {batch.size} from step {step}: certified for {listed(sorted(sizes))} only"
            )
    known = f"for {' and '.join(certified)} only" if certified else "without calls of it"
    return f"{name} takes {inputs} from step {step}: certified {known}"


_AUTOCAST = re.compile(r"(?:^|, )(?=autocast to )")


def _autocast_of(inputs: str) -> str:
    return ", ".join(_AUTOCAST.split(inputs)[1:]) or "autocast off"


class _Batch(NamedTuple):
    """Size of the first dimension that all inputs share, and the rest of their shapes, with their types."""

    size: int
    rest: tuple[tuple[str, str], ...]


def _batch_of(inputs: str) -> _Batch | None:
    kinds = _KIND.findall(inputs)
    sizes = {shape.partition(", ")[0] for _, shape in kinds}
    if len(sizes) != 1 or not (size := sizes.pop()).isdecimal():
        return None
    return _Batch(int(size), tuple((dtype, shape.partition(", ")[2]) for dtype, shape in kinds))
