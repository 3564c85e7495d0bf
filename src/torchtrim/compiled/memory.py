"""The memory of compiled graphs in the order of a step: forwards, then their backwards in reverse."""

from __future__ import annotations

import gc
from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import pairwise
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


class Simulated(NamedTuple):
    """Bytes over the start of a step: the level at each change, its highest, and at the end of forwards.

    `forward_peak` and `backward_peak`: the highest of each part. `kernels`: backward's kernels of libraries,
    and the highest level until each has ended, since the one before. `unmeasured`: those whose own memory
    could not be measured, and counts as none.
    """

    curve: tuple[int, ...]
    saved_bytes: int
    forward_peak: int
    backward_peak: int
    unmeasured: tuple[str, ...]
    kernels: tuple[tuple[str, int], ...] = ()

    @property
    def peak_bytes(self) -> int:
        """The highest level."""
        return max(self.forward_peak, self.backward_peak)


def memory_of(calls: Sequence[GraphCall], rises: Rises | None = None) -> Simulated:
    """Return the memory of these calls, the forwards in this order.

    `rises`: what kernels of libraries allocate, kept from one simulation to the next.
    """
    collects = gc.isenabled()
    gc.disable()  # else the collector's moment would decide when a buffer is freed
    try:
        with torch.no_grad(), FakeTensorMode(allow_non_fake_inputs=True):
            return _SimulatedStep(calls, Meter(rises)).run()
    finally:
        if collects:
            gc.enable()


class _SimulatedStep:
    """A simulated step: what each call has returned, and the gradients that wait for each."""

    def __init__(self, calls: Sequence[GraphCall], meter: Meter) -> None:
        self._calls = calls
        self._meter = meter
        self._results: list[list[Any]] = []
        self._values: list[dict[str, Any]] = []
        self._waiting: defaultdict[int, list[torch.Tensor]] = defaultdict(list)
        self._gradients: list[Any] = []

    def run(self) -> Simulated:
        meter = self._meter
        with meter:
            for call in self._calls:
                self._forward(call)
            saved, forwards, kernels = meter.level, len(meter.curve), len(meter.kernels)
            for number, call in reversed([*enumerate(self._calls)]):
                self._backward(number, call)
            curve = tuple(meter.curve)
        backward_peak = max(curve[forwards - 1 :])
        unmeasured = tuple(sorted(meter.unmeasured))
        forward_peak, ran = max(curve[:forwards]), meter.kernels[kernels:]
        ends = [forwards, *(end for _, end in ran)]
        highest = (max(curve[begin - 1 : end]) for begin, end in pairwise(ends))
        of_backward = tuple(zip((name for name, _ in ran), highest, strict=True))
        return Simulated(curve, saved, forward_peak, backward_peak, unmeasured, of_backward)

    def _forward(self, call: GraphCall) -> None:
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
        self._values.append(
            dict(zip(names, inputs, strict=True)) | dict(zip(code.outputs, results, strict=True))
        )

    def _backward(self, number: int, call: GraphCall) -> None:
        """Run a backward: its code frees what it takes. What else its forward returned the program holds."""
        values, code = self._values.pop(), call.pair.backward
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
