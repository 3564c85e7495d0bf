"""A step: tasks in the order of their launch, and the tensors they read and create.

A tensor is alive from the task that creates it until the last of its holds ends. A hold is a reason to keep
the tensor: autograd saved it for backward, or an operator or a Python name still needs it. Edits end holds,
and the simulator derives from that how long the tensor lives.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

from torchtrim.records.profile import Operator, Profile

DETACH = "aten::detach."  # Prefix of the names of `detach` operators.
# The pool whose peak is the peak of the step: the memory of the device that runs it.
DEVICE = "device"


class Hold(NamedTuple):
    """A reason to keep a tensor until task `until` begins.

    `saver`: the task whose gradient needs the tensor, or -1 if autograd did not save it. It was saved after
    task `packed` had run, and backward first unpacks it when task `asked` is next (-1: never).
    `hooked`: hooks of the script packed it.
    """

    until: int
    saver: int = -1
    packed: int = -1
    asked: int = -1
    hooked: bool = False


class Tensor(NamedTuple):
    """A block of memory that task `birth` allocates, or -1 if it is older than the step."""

    bytes: int
    kind: str
    pool: str
    birth: int
    holds: tuple[Hold, ...]

    @property
    def death(self) -> int:
        """The first task during which the tensor is no longer alive."""
        return max((hold.until for hold in self.holds), default=self.birth + 1)

    def end(self, dropped: Collection[int] = (), needed: Iterable[int] = ()) -> int:
        """Return the death without the `dropped` holds, if the tensor is needed until the tasks `needed`."""
        kept = (hold.until for place, hold in enumerate(self.holds) if place not in dropped)
        return max((self.birth + 1, *kept, *needed))


class Task(NamedTuple):
    """One operator, with tensors as numbers. `writes` are the tensors that it changes in place.

    `of`: for a task of backward, the task whose gradient it computes; else -1. `transient`: the highest rise
    of memory while it runs, in bytes, outputs included. `seconds`: its time on the recording machine.
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
    """The tasks `first <= i < last`."""

    first: int
    last: int


class StepModule(NamedTuple):
    """A module of the program. `parent` is its number, or -1 for a root. `chain`: its children run in order.

    `hooked`: it has user hooks. `writes`: state outside its own tensors and attributes that its code writes.
    `hooked_with_all`: its only hooks are on the forward of all modules; `writes` has their writes. `rereads`:
    its code may read a tensor that its last call left in an attribute. `appends`: its writes only append to
    lists, and a rerun takes back its own.
    """

    path: str
    type: str
    parent: int
    chain: bool
    hooked: bool
    writes: str = ""
    hooked_with_all: bool = False
    rereads: bool = True
    appends: bool = False

    @property
    def runs_once(self) -> bool:
        """True if the forward must not run more often than the program runs it."""
        return self.never_reruns or bool(self.writes)

    @property
    def never_reruns(self) -> bool:
        """True if the forward must not run again even if lists are put back."""
        hooked = self.hooked and not self.hooked_with_all
        return hooked or (bool(self.writes) and not self.appends)


class StepCall(NamedTuple):
    """A forward call of module `module`: its tasks, its input tensors and its outputs.

    `held`: tensors inside objects among the arguments, such as a cache of keys and values.
    """

    module: int
    span: Span
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    graded: bool
    held: tuple[int, ...] = ()


class Overhead(NamedTuple):
    """Cost of recomputation beyond the tasks themselves.

    In seconds: for each `task`, each `span`, each `recipe` that rebuilds a tensor, and each task `watched`
    for a recipe. Profiles without measurements get defaults from `bench.planning` and `bench.replay` on a
    busy AMD EPYC. `random_state`: bytes of the CPU generator's state, kept from a span's first run to its
    rerun; zero if the step's memory is a device's.
    """

    task: float = 2.7e-5
    span: float = 4.8e-4
    random_state: int = 5_056
    recipe: float = 1.2e-4
    watched: float = 2.5e-5


OVERHEAD = Overhead()  # The default overhead.


@dataclass(frozen=True, eq=False)
class Step:
    """Tasks and tensors, and the modules that ran them.

    `seconds`: the time of the whole step without a recorder. `profile`: its source, or None for a graph.
    """

    tasks: tuple[Task, ...]
    tensors: tuple[Tensor, ...]
    modules: tuple[StepModule, ...] = ()
    calls: tuple[StepCall, ...] = ()
    seconds: float = 0.0
    overhead: Overhead = OVERHEAD
    profile: Profile | None = field(default=None, repr=False)

    @property
    def operators(self) -> Sequence[Operator]:
        """The recorded operators; empty for a graph."""
        return self.profile.operators if self.profile is not None else ()

    @cached_property
    def backward(self) -> dict[int, tuple[int, ...]]:
        """For each forward task, the tasks that compute its gradient."""
        backward: dict[int, tuple[int, ...]] = {}
        for number, task in enumerate(self.tasks):
            if task.of >= 0:
                backward[task.of] = (*backward.get(task.of, ()), number)
        return backward

    @cached_property
    def clock(self) -> tuple[float, ...]:
        """The start of each task and the end of the last one, in seconds.

        `detach` takes no time: it does no work, and saved-tensor hooks make autograd run it elsewhere.
        """
        moments = [0.0]
        for task in self.tasks:
            moments.append(moments[-1] + (0.0 if task.name.startswith(DETACH) else task.seconds))
        return tuple(moments)

    @cached_property
    def made_by(self) -> tuple[tuple[int, ...], ...]:
        """For each task, the tensors that it allocates."""
        found: list[list[int]] = [[] for _ in self.tasks]
        for number, tensor in enumerate(self.tensors):
            if tensor.birth >= 0:
                found[tensor.birth].append(number)
        return tuple(map(tuple, found))

    @cached_property
    def replaced(self) -> tuple[tuple[int, int], ...]:
        """Tensors from before the step that end while it runs, with the task before which each ends.

        One is a module's attribute from the last step, which forward replaces.
        """
        return tuple(
            (number, tensor.death)
            for number, tensor in enumerate(self.tensors)
            if tensor.birth < 0 and tensor.death < len(self.tasks) and tensor.pool == DEVICE
        )

    @cached_property
    def given(self) -> dict[Span, tuple[int, ...]]:
        """The inputs of module calls by span, including tensors inside objects among the arguments."""
        inputs: dict[Span, tuple[int, ...]] = {}
        for call in self.calls:
            inputs[call.span] = (*inputs.get(call.span, ()), *call.inputs, *call.held)
        return inputs

    @cached_property
    def saved(self) -> tuple[tuple[tuple[int, int], ...], ...]:
        """For each task, the (tensor, hold) pairs that autograd saved for its gradient."""
        found: list[list[tuple[int, int]]] = [[] for _ in self.tasks]
        for number, tensor in enumerate(self.tensors):
            for place, hold in enumerate(tensor.holds):
                if hold.saver >= 0:
                    found[hold.saver].append((number, place))
        return tuple(map(tuple, found))
