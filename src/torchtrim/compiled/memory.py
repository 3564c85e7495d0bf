"""The memory of compiled graphs in the order of their calls in a step."""

from __future__ import annotations

import gc
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from torchtrim.compiled.code import Code, Spec
from torchtrim.compiled.wrapper import Meter, Rises, like, runnable


class Pair(NamedTuple):
    """The code of a graph: its forward, and its backward if it has gradients."""

    forward: Code
    backward: Code | None

    @classmethod
    def of(cls, codes: Sequence[Code]) -> Pair:
        """Return a pair of the codes that Inductor wrote for one graph."""
        backward = next((code for code in codes if code.backward), None)
        return cls(next(code for code in codes if not code.backward), backward)


class GraphCall(NamedTuple):
    """A call of a graph. `sources`: inputs, by position, that an earlier call returned, and where."""

    pair: Pair
    sources: Mapping[int, tuple[int, int]] = {}


class Event(NamedTuple):
    """The begin of a call of a graph, by its number in the step, or of the backward of that call."""

    call: int
    backward: bool = False


def in_order(calls: int, events: Sequence[Event] = ()) -> tuple[Event, ...]:
    """Return the events of a number of calls: those known, then what is left, backwards in reverse."""
    forwards = (Event(number) for number in range(calls))
    backwards = (Event(number, True) for number in reversed(range(calls)))
    return (*events, *(one for one in (*forwards, *backwards) if one not in events))


UPDATE = "update"
"""The phase after all backwards."""


def name_of(event: Event) -> str:
    """Return the name of the phase that begins with an event."""
    return f"{'backward' if event.backward else 'forward'} {event.call}"


def after(forward: str) -> str:
    """Return the name of the phase between the end of a forward and the next event."""
    return f"after {forward}"


class Simulated(NamedTuple):
    """Bytes over the start of a step: the level at each change, its highest, and the most after a forward.

    `forward_peak` and `backward_peak`: the highest of each part, forwards with what follows them.
    `phases`: the highest of each phase, by its name. `kernels`: backward's kernels of libraries,
    and the highest level until each has ended, since the one before. `unmeasured`: those whose own memory
    could not be measured, and counts as none.
    """

    curve: tuple[int, ...]
    saved_bytes: int
    forward_peak: int
    backward_peak: int
    unmeasured: tuple[str, ...]
    kernels: tuple[tuple[str, int], ...] = ()
    phases: Mapping[str, int] = {}

    @property
    def peak_bytes(self) -> int:
        """The highest level."""
        return max(self.forward_peak, self.backward_peak, self.phases.get(UPDATE, 0))


def memory_of(
    calls: Sequence[GraphCall],
    rises: Rises | None = None,
    events: Sequence[Event] = (),
    above: Mapping[str, int] = {},
) -> Simulated:
    """Return the memory of these calls.

    `rises`: what kernels of libraries allocate, kept from one simulation to the next. `events`: the order, by
    default all forwards and then the backwards in reverse. `above`: bytes to add in each phase.
    """
    collects = gc.isenabled()
    gc.disable()  # else the collector's moment would decide when a buffer is freed
    try:
        with torch.no_grad(), FakeTensorMode(allow_non_fake_inputs=True):
            return _SimulatedStep(calls, Meter(rises)).run(in_order(len(calls), events), above)
    finally:
        if collects:
            gc.enable()


class _SimulatedStep:
    """A simulated step: what each call has returned, and the gradients that wait for each."""

    def __init__(self, calls: Sequence[GraphCall], meter: Meter) -> None:
        self._calls = calls
        self._meter = meter
        self._results: list[list[Any]] = []
        self._values: dict[int, dict[str, Any]] = {}
        self._waiting: defaultdict[int, list[torch.Tensor]] = defaultdict(list)
        self._gradients: list[Any] = []

    def run(self, events: Sequence[Event], above: Mapping[str, int]) -> Simulated:
        meter, saved = self._meter, 0
        phases: dict[str, int] = {}
        kernels: list[tuple[str, int]] = []
        for event in events:
            begin, ran = len(meter.curve), len(meter.kernels)
            with meter:
                (self._backward if event.backward else self._forward)(event.call)
            inside = name_of(event)
            phases[inside] = max(meter.curve[begin - 1 :]) + above.get(inside, 0)
            if not event.backward:
                phases[after(inside)] = meter.level + above.get(after(inside), 0)
                saved = max(saved, meter.level)
            for name, end in meter.kernels[ran:] if event.backward else ():
                kernels.append((name, max(meter.curve[begin - 1 : end]) + above.get(inside, 0)))
                begin = end
        phases[UPDATE] = meter.level + above.get(UPDATE, 0)
        unmeasured, curve = tuple(sorted(meter.unmeasured)), tuple(meter.curve)
        forward, backward = (
            max((size for name, size in phases.items() if part in name), default=0)
            for part in ("forward", "backward")
        )
        return Simulated(curve, saved, forward, backward, unmeasured, tuple(kernels), phases)

    def _forward(self, number: int) -> None:
        call = self._calls[number]
        inputs = [
            self._results[call.sources[at][0]][call.sources[at][1]]
            if at in call.sources
            else self._meter.uncounted(spec)
            for at, (_, spec) in enumerate(call.pair.forward.inputs)
        ]
        code = call.pair.forward
        names = [name for name, _ in code.inputs]
        results = list(runnable(code, self._meter)([*inputs]))
        self._results.append(results)
        self._values[number] = dict(zip(names, inputs, strict=True))
        self._values[number] |= dict(zip(code.outputs, results, strict=True))

    def _backward(self, number: int) -> None:
        """Run a backward: its code frees what it takes. What else its forward returned the program holds."""
        call = self._calls[number]
        values, code = self._values.pop(number), call.pair.backward
        results = self._results[number]
        if code is None:
            results.clear()
            return
        names = {name for name, _ in code.inputs}
        outputs = call.pair.forward.outputs
        held = [value for name, value in zip(outputs, results, strict=True) if name not in names]
        results.clear()
        taken = [values.get(name) for name, _ in code.inputs]
        values.clear()
        for at, (name, spec) in enumerate(code.inputs):
            if name not in outputs and taken[at] is None:
                taken[at] = self._tangent(number, spec)
        gradients = runnable(code, self._meter)(taken)
        for at, gradient in enumerate(gradients):
            source = call.sources.get(at)
            if isinstance(gradient, torch.Tensor):
                (self._gradients if source is None else self._waiting[source[0]]).append(gradient)
        del held

    def _tangent(self, number: int, spec: Spec | int | None) -> Any:
        """Return the gradient of an output: a later call's, or a new one."""
        waiting = self._waiting[number]
        for at, gradient in enumerate(waiting):
            if isinstance(spec, Spec) and tuple(gradient.shape) == spec.sizes:
                return waiting.pop(at)
        return like(spec)
