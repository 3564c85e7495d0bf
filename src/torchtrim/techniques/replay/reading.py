"""Reads from a step which of its saved tensors could be made again, and from what."""

from __future__ import annotations

import math
from functools import cached_property
from typing import NamedTuple

from torchtrim.records.profile import Profile
from torchtrim.records.roles import role_of
from torchtrim.step.index import index_of
from torchtrim.step.step import DEVICE, Hold, Step
from torchtrim.techniques.replay.table import (
    BATCH_NORMS,
    DRAW,
    MAKERS,
    NAMESPACE,
    NOISE,
    SCALES,
    WRITERS,
)

_SIZES = {"float32": 4, "float64": 8, "bfloat16": 2, "float16": 2}
_STATE = frozenset(("parameter", "buffer", "optimizer_state", "gradient", "gathered"))


class Made(NamedTuple):
    """A tensor that can be made again: by which tasks, the first of which allocates it, from which others.

    `holds`: what autograd saved of it, with the hold's number. `elements`: of noise, which is kept as bits; 0
    for all else.
    """

    tensor: int
    tasks: tuple[int, ...]
    inputs: tuple[int, ...]
    holds: tuple[tuple[int, Hold], ...]
    elements: int = 0

    @property
    def savers(self) -> list[int]:
        """The tasks that autograd saved it for."""
        return [hold.saver for _, hold in self.holds]

    @property
    def packed(self) -> int:
        """The task before which autograd first saves it."""
        return min(hold.packed for _, hold in self.holds) + 1

    @property
    def asked(self) -> int:
        """The first task at which backward asks for it; -1 if it never does."""
        return min((hold.asked for _, hold in self.holds if hold.asked >= 0), default=-1)

    @property
    def until(self) -> int:
        """When backward has left the last that asks for it."""
        return max((hold.until for _, hold in self.holds if hold.asked >= 0), default=-1)


class RemakeReader:
    """Reads how tensors of a step are made again."""

    def __init__(self, step: Step, profile: Profile) -> None:
        self.step = step
        self._profile = profile
        self._known: dict[int, Made | None] = {}
        self._writers = index_of(step).writers

    @cached_property
    def names(self) -> list[str]:
        """The operators' names; empty for operators that are not torch's own."""
        return [self._name(index) for index in range(len(self.step.tasks))]

    @cached_property
    def roles(self) -> list[str]:
        """The operators' roles, as plans write them; empty for operators that are not torch's own."""
        return [role_of(name) for name in self.names]

    def _name(self, index: int) -> str:
        task = self.step.tasks[index]
        if not task.name.startswith(NAMESPACE):
            return ""
        name = task.name.removeprefix(NAMESPACE).partition(".")[0]
        overwrites = task.writes and not self._profile.operators[index].mutates
        return f"{name}_" if overwrites else name

    def made(self, tensor: int) -> Made | None:
        """How a tensor is made again; None if it cannot be."""
        if tensor not in self._known:
            self._known[tensor] = None
            self._known[tensor] = self._make(tensor)
        return self._known[tensor]

    def _make(self, number: int) -> Made | None:
        tensor = self.step.tensors[number]
        if tensor.birth < 0 or tensor.pool != DEVICE or tensor.kind in _STATE:
            return None
        writes = [w for w in self._writers.get(number, ()) if w != tensor.birth]
        tasks = (tensor.birth, *writes)
        holds = tuple((place, hold) for place, hold in enumerate(tensor.holds) if hold.saver >= 0)
        if any(hold.packed < tasks[-1] for _, hold in holds):
            return None
        if self.names[tensor.birth] == NOISE:
            return self._noise(number, tasks, holds)
        if not self._may_run(number, tasks):
            return None
        inputs = [n for task in tasks for n in self.step.tasks[task].reads if n != number]
        if all(map(self.is_state, inputs)):
            return None  # a parameter's cast, which autocast keeps for its next use
        return Made(number, tasks, tuple(dict.fromkeys(inputs)), holds)

    def _noise(
        self, number: int, tasks: tuple[int, ...], holds: tuple[tuple[int, Hold], ...]
    ) -> Made | None:
        """Noise of dropout, which is saved, dense, and of a multiple of eight elements."""
        first, *rest = tasks
        names = [self.names[task] for task in rest]
        used = self._profile.operators[first].outputs[0]
        elements = math.prod(used.shape)
        dense = elements * _SIZES.get(used.dtype, 0) == self.step.tensors[number].bytes
        fits = holds and names[:1] == [DRAW] and dense and elements % 8 == 0
        if not fits or not SCALES.issuperset(names[1:]):
            return None
        if not all(self._writes_all(task, first) for task in rest):
            return None
        return Made(number, tasks, (), holds, elements)

    def _may_write(self, writer: int, maker: int) -> bool:
        return self.names[writer] in WRITERS and self._writes_all(writer, maker)

    def _may_run(self, number: int, tasks: tuple[int, ...]) -> bool:
        first, *rest = tasks
        makes = self.step.tasks[first].makes
        if self.names[first] not in MAKERS or not makes or makes[0] != number:
            return False
        if any(self.step.tasks[task].phase != "forward" for task in tasks):
            return False
        return all(self._may_write(task, first) for task in rest)

    def _writes_all(self, writer: int, maker: int) -> bool:
        """Whether an operator writes the whole of what another made, and that alone."""
        task, operators = self.step.tasks[writer], self._profile.operators
        if len(task.writes) != 1 or not operators[writer].outputs:
            return False
        wrote, made = operators[writer].outputs[0], operators[maker].outputs[0]
        return (wrote.dtype, wrote.shape, wrote.strides) == (made.dtype, made.shape, made.strides)

    def is_state(self, tensor: int) -> bool:
        """Whether it is there in backward whatever happens, or counts for none of the step's memory."""
        return self.step.tensors[tensor].kind in _STATE or self.step.tensors[tensor].pool != DEVICE

    def is_unchanged(self, tensor: int, task: int, until: int) -> bool:
        """Whether nothing writes to an input from the task that reads it until that runs again."""
        return not any(
            task <= write < until
            for write in self._writers.get(tensor, ())
            if self.names[write] not in BATCH_NORMS
        )

    def is_settled(self, made: Made, reader: int) -> bool:
        """Whether a tensor is what it will be when a task reads it."""
        return made.tasks[-1] < reader
