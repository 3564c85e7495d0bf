"""A step: tasks in the order in which they are issued, and the tensors that they read and make.

A tensor is alive from the task that makes it until the last of its holds ends. A hold is a reason to keep
it: autograd saved it for backward, or an operator or a Python name still needs it. Edits end holds, and the
simulator then knows how long the tensor lives.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

from torchtrim.records.profile import Operator, Profile

DETACH = "aten::detach."
DEVICE = "device"
"""The pool whose peak is the step's: the memory of the device that runs it."""


class Hold(NamedTuple):
    """A reason to keep a tensor until task `until` begins.

    `saver`: the task whose gradient autograd saved it for, -1 for another reason. It was saved after task
    `packed` had run, and backward first asks for it when task `asked` is next, -1 for never.
    """

    until: int
    saver: int = -1
    packed: int = -1
    asked: int = -1


class Tensor(NamedTuple):
    """A block of memory, made by task `birth`; -1 for one from before the step."""

    bytes: int
    kind: str
    pool: str
    birth: int
    holds: tuple[Hold, ...]

    @property
    def death(self) -> int:
        """The first task during which it is no longer alive."""
        return max((hold.until for hold in self.holds), default=self.birth + 1)


class Task(NamedTuple):
    """One operator. Tensors are numbers; `writes` are those that it changes in place.

    `of`: the task whose gradient a task of backward computes, -1 for others. `transient`: the highest that
    memory rises while it runs, in bytes, what it makes included. `seconds`: on the machine that recorded it.
    """

    name: str
    phase: str
    of: int
    reads: tuple[int, ...]
    makes: tuple[int, ...]
    writes: tuple[int, ...]
    transient: int
    seconds: float


class Span(NamedTuple):
    """Tasks `first <= i < last`."""

    first: int
    last: int


class Module(NamedTuple):
    """A module of the program. `parent` is a number, -1 for a root's. `chain`: its children run in turn.

    `hooked`: it carries user hooks. `writes`: what its code writes beyond its own tensors and attributes.
    """

    path: str
    type: str
    parent: int
    chain: bool
    hooked: bool
    writes: str = ""

    @property
    def runs_once(self) -> bool:
        """Whether its forward may not be called more often than the program does."""
        return self.hooked or bool(self.writes)


class Call(NamedTuple):
    """A forward call of module `module`: its tasks, and the tensors that went in and came out.

    `held`: those that objects among its arguments had, such as a cache of keys and values.
    """

    module: int
    span: Span
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    graded: bool
    held: tuple[int, ...] = ()


class Overhead(NamedTuple):
    """What running again takes besides the tasks' own: seconds for each task and for each span, for each
    recipe of a tensor and for each task that is watched for one, and bytes for each span.

    Seconds are those of `bench.planning` and `bench.replay` on an AMD EPYC with others at work, and hold
    where a profile has not its machine's. `random_state`: the CPU generator's state, which is kept from the
    first run of a span to the second; none where the step's memory is a device's, since it is on the host.
    """

    task: float = 2.7e-5
    span: float = 4.8e-4
    random_state: int = 5_056
    recipe: float = 1.2e-4
    watched: float = 2.5e-5


OVERHEAD = Overhead()


@dataclass(frozen=True, eq=False)
class Step:
    """Tasks and tensors, and the modules that ran them.

    `seconds`: the whole step without a recorder. `profile`: what it was read from, None for a graph.
    """

    tasks: tuple[Task, ...]
    tensors: tuple[Tensor, ...]
    modules: tuple[Module, ...] = ()
    calls: tuple[Call, ...] = ()
    seconds: float = 0.0
    overhead: Overhead = OVERHEAD
    profile: Profile | None = field(default=None, repr=False)

    @property
    def operators(self) -> Sequence[Operator]:
        """The operators that were recorded; none for a graph."""
        return self.profile.operators if self.profile is not None else ()

    @cached_property
    def backward(self) -> dict[int, tuple[int, ...]]:
        """For each task of forward the tasks that compute its gradient."""
        found: dict[int, list[int]] = {}
        for number, task in enumerate(self.tasks):
            if task.of >= 0:
                found.setdefault(task.of, []).append(number)
        return {of: tuple(tasks) for of, tasks in found.items()}

    @cached_property
    def clock(self) -> tuple[float, ...]:
        """When each task begins, in seconds, and when the last ends.

        `detach` takes none: it is no work, and autograd runs it elsewhere where tensors are saved by hooks.
        """
        moments = [0.0]
        for task in self.tasks:
            moments.append(moments[-1] + (0.0 if task.name.startswith(DETACH) else task.seconds))
        return tuple(moments)

    @cached_property
    def made_by(self) -> tuple[tuple[int, ...], ...]:
        """The tensors whose memory each task allocates."""
        found: list[list[int]] = [[] for _ in self.tasks]
        for number, tensor in enumerate(self.tensors):
            if tensor.birth >= 0:
                found[tensor.birth].append(number)
        return tuple(map(tuple, found))

    @cached_property
    def given(self) -> dict[Span, tuple[int, ...]]:
        """By their tasks, the tensors that calls were given, and that objects among their arguments had."""
        found: dict[Span, tuple[int, ...]] = {}
        for call in self.calls:
            found[call.span] = (*found.get(call.span, ()), *call.inputs, *call.held)
        return found

    @cached_property
    def saved(self) -> tuple[tuple[tuple[int, int], ...], ...]:
        """For each task the `(tensor, hold)` that autograd saved for its gradient."""
        found: list[list[tuple[int, int]]] = [[] for _ in self.tasks]
        for number, tensor in enumerate(self.tensors):
            for place, hold in enumerate(tensor.holds):
                if hold.saver >= 0:
                    found[hold.saver].append((number, place))
        return tuple(map(tuple, found))
