"""Finds the saved tensors of a step that can be recomputed, with their inputs."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Sequence
from functools import cached_property, partial
from typing import NamedTuple

from torchtrim.executor.roles import RECURRENT, UNNAMED, OperatorOrdinal, OperatorRoles
from torchtrim.records.operator_names import role_of
from torchtrim.records.profile import STATE, Operator, Profile
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


class Remake(NamedTuple):
    """A tensor that can be recomputed: its tasks (the first allocates it) and its inputs.

    `holds`: autograd's saves of it, by index. `elements`: for noise, which is kept as bits; otherwise 0.
    """

    tensor: int
    tasks: tuple[int, ...]
    inputs: tuple[int, ...]
    holds: tuple[tuple[int, Hold], ...]
    elements: int = 0

    @property
    def savers(self) -> list[int]:
        """Tasks that autograd saved it for."""
        return [hold.saver for _, hold in self.holds]

    @property
    def packed(self) -> int:
        """Task before which autograd first saves it."""
        return min(hold.packed for _, hold in self.holds) + 1

    @property
    def asked(self) -> int:
        """First backward task that reads it, or -1."""
        return min((hold.asked for _, hold in self.holds if hold.asked >= 0), default=-1)

    @property
    def until(self) -> int:
        """End of the last backward task that reads it."""
        return max((hold.until for _, hold in self.holds if hold.asked >= 0), default=-1)

    @property
    def dropped(self) -> int:
        """Task before which the last graph that saved it is gone; -1 if none did."""
        return max((hold.until for _, hold in self.holds), default=-1)


class RemakeReader:
    """Finds out how tensors of a step can be recomputed."""

    def __init__(self, step: Step, profile: Profile) -> None:
        self.step = step
        self._profile = profile
        self._known: dict[int, Remake | None] = {}
        self._writers = index_of(step).writers

    @cached_property
    def names(self) -> list[str]:
        """Operator names; empty for operators that are not torch's own."""
        return [*map(self._name, range(len(self.step.tasks)))]

    @cached_property
    def roles(self) -> list[str]:
        """Operator roles as in plans; empty for operators that no place names."""
        return roles_of(self.step, self._profile, self.names)

    @cached_property
    def forward_tasks(self) -> dict[str, list[int]]:
        """Forward tasks by role."""
        tasks: defaultdict[str, list[int]] = defaultdict(list)
        for index, name in enumerate(self.roles):
            if self.step.tasks[index].phase == "forward":
                tasks[name].append(index)
        return dict(tasks)

    def ordinal(self, task: int, first: int) -> OperatorOrdinal:
        """Return the task's role, and its ordinal among forward tasks of that role since `first`."""
        tasks = self.forward_tasks.get(name := self.roles[task], [])
        return OperatorOrdinal(name, bisect_left(tasks, task) - bisect_left(tasks, first))

    def _name(self, index: int) -> str:
        task = self.step.tasks[index]
        if not task.name.startswith(NAMESPACE):
            return ""
        name = task.name.removeprefix(NAMESPACE).partition(".")[0]
        overwrites = task.writes and not self._profile.operators[index].mutates
        return f"{name}_" if overwrites else name

    def made(self, tensor: int) -> Remake | None:
        """Return how a tensor can be recomputed, or None."""
        if tensor not in self._known:
            self._known[tensor] = None
            self._known[tensor] = self._make(tensor)
        return self._known[tensor]

    def made_for(self, tensor: int, task: int) -> Remake | None:
        """Return how a tensor can be recomputed for a task that reads it in the dtype it was made in."""
        made = self.made(tensor)
        return made if made is not None and self._is_read_as_made(made, task) else None

    def _is_read_as_made(self, made: Remake, task: int) -> bool:
        """Return False for a complex tensor that is read as pairs of numbers, and other views of bits."""
        uses = self._profile.operators[task].inputs
        storages = [*dict.fromkeys(use.storage for use in uses)]
        reads = dict(zip(self.step.tasks[task].reads, storages, strict=False))
        kind = self._profile.operators[made.tasks[0]].outputs[0].dtype
        return all(u.dtype == kind for u in uses if u.storage == reads.get(made.tensor))

    def _make(self, number: int) -> Remake | None:
        tensor = self.step.tensors[number]
        if tensor.birth < 0 or tensor.pool != DEVICE or tensor.kind in STATE:
            return None
        writes = [w for w in self._writers.get(number, ()) if w != tensor.birth]
        tasks = (tensor.birth, *writes)
        holds = tuple((place, hold) for place, hold in enumerate(tensor.holds) if hold.saver >= 0)
        if any(hold.hooked or hold.packed < tasks[-1] for _, hold in holds):
            return None
        if self.names[tensor.birth] == NOISE:
            return self._noise(number, tasks, holds)
        if not self._may_run(number, tasks):
            return None
        inputs = [n for task in tasks for n in self.step.tasks[task].reads if n != number]
        if all(map(self.is_state, inputs)):
            return None  # autocast caches the casts of parameters
        return Remake(number, tasks, tuple(dict.fromkeys(inputs)), holds)

    def _noise(
        self, number: int, tasks: tuple[int, ...], holds: tuple[tuple[int, Hold], ...]
    ) -> Remake | None:
        """Recognize dropout noise that is saved, dense, and has a multiple of eight elements."""
        first, *rest = tasks
        names = [self.names[task] for task in rest]
        used = self._profile.operators[first].outputs[0]
        elements = math.prod(used.shape)
        dense = elements * _SIZES.get(used.dtype, 0) == self.step.tensors[number].bytes
        fits = holds and names[:1] == [DRAW] and dense and elements % 8 == 0
        scaled = fits and SCALES.issuperset(names[1:])
        if not scaled or not all(self._writes_all(task, first) for task in rest):
            return None
        return Remake(number, tasks, (), holds, elements)

    def _may_run(self, number: int, tasks: tuple[int, ...]) -> bool:
        first, *rest = tasks
        makes = self.step.tasks[first].makes
        if self.names[first] not in MAKERS or makes[:1] != (number,):
            return False
        if self._profile.operators[first].random:
            return False
        if any(self.roles[task] == UNNAMED for task in tasks):
            return False
        if any(self.step.tasks[task].phase != "forward" for task in tasks):
            return False
        return all(self.names[w] in WRITERS and self._writes_all(w, first) for w in rest)

    def _writes_all(self, writer: int, maker: int) -> bool:
        """Return True if an operator overwrites the entire result of another and nothing else."""
        task, operators = self.step.tasks[writer], self._profile.operators
        if len(task.writes) != 1 or not operators[writer].outputs:
            return False
        wrote, made = operators[writer].outputs[0], operators[maker].outputs[0]
        return (wrote.dtype, wrote.shape, wrote.strides) == (made.dtype, made.shape, made.strides)

    def is_state(self, tensor: int) -> bool:
        """Return True if the tensor is always there in backward, or takes no memory of the step."""
        return self.step.tensors[tensor].kind in STATE or self.step.tensors[tensor].pool != DEVICE

    def is_unchanged(self, tensor: int, task: int, until: int) -> bool:
        """Return True if nothing writes to an input between the task that reads it and its rerun."""
        return not any(
            task <= write < until
            for write in self._writers.get(tensor, ())
            if self.names[write] not in BATCH_NORMS
        )


def roles_of(step: Step, profile: Profile, names: Sequence[str]) -> list[str]:
    """Return the role of each task; those of forward depend on what runs before them."""
    naming, roles = OperatorRoles(), [*map(role_of, names)]
    for index, operator in enumerate(profile.operators):
        if step.tasks[index].phase != "forward":
            continue
        overload = operator.name.partition(".")[2]
        recurs = operator.module >= 0 and profile.modules[operator.module].type in RECURRENT
        read = partial(_storages_read, operator)
        roles[index] = naming.role(names[index], overload, read, recurs=recurs)
        if naming.asks and operator.outputs:
            naming.made(operator.outputs[0].storage)
        for joined in naming.joined:
            roles[_last(roles, joined, index)] = UNNAMED
    return roles


def _storages_read(operator: Operator) -> list[int]:
    return [use.storage for use in operator.inputs]


def _last(roles: Sequence[str], role: str, before: int) -> int:
    return next(index for index in reversed(range(before)) if roles[index] == role)
