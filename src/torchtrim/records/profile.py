"""A profile: the record of one step. Plain data: reading, drawing and planning need no torch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from typing import Annotated, Literal, get_args

from msgspec import Meta, Struct

from torchtrim.records.loader import LoaderCost

Count = Annotated[int, Meta(ge=0, le=2**62)]
Index = Annotated[int, Meta(ge=-1, le=2**31)]
Seconds = Annotated[float, Meta(ge=0)]
Rate = Annotated[float, Meta(ge=0)]
Text = Annotated[str, Meta(max_length=4096)]
Phase = Literal["forward", "backward", "recompute", "optimizer", "loader", "other"]
Kind = Literal[
    "parameter",
    "buffer",
    "gradient",
    "optimizer_state",
    "gathered",
    "activation",
    "temporary",
    "input",
]
KINDS: tuple[Kind, ...] = get_args(Kind)
ALWAYS: frozenset[Kind] = frozenset(("parameter", "buffer", "optimizer_state"))
STATE: frozenset[Kind] = ALWAYS | {"gradient", "gathered"}
DEVICE_POOL = "device"


class TensorUse(Struct, frozen=True, array_like=True, gc=False):
    """A tensor as an operator used it: a view of a storage. Strides are in elements."""

    storage: Count
    dtype: Text
    shape: tuple[int, ...]
    strides: tuple[int, ...]


def is_contiguous(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Return True if the elements are contiguous in row-major order."""
    step = 1
    for size, stride in zip(reversed(shape), reversed(strides), strict=True):
        if size != 1 and stride != step:
            return False
        step *= size
    return True


def strides_of(shape: Sequence[int], order: Sequence[int]) -> tuple[int, ...]:
    """Return the strides of dimensions nested in this order, the last one innermost."""
    strides, step = [0] * len(shape), 1
    for dimension in reversed(order):
        strides[dimension] = step
        step *= max(shape[dimension], 1)
    return tuple(strides)


class Operator(Struct, frozen=True, array_like=True, gc=False):
    """One ATen operator. `module`, `place`, `caller`, `label` and `forward` are indices, or -1.

    `forward` is the operator whose gradient a backward operator computes; the backward operator has the same
    place and module. `transient_bytes` is the largest rise in memory during the operator, including its
    outputs. `start` counts from the start of the step. `seconds` is the median over the profile's
    `recorded_steps`, `spread` their range. `random`: it draws random numbers.
    """

    name: Text
    phase: Phase
    module: Index
    place: Index
    caller: Index
    label: Index
    forward: Index
    inputs: tuple[TensorUse, ...]
    outputs: tuple[TensorUse, ...]
    mutates: tuple[Count, ...]
    start: Seconds
    seconds: Seconds
    transient_bytes: Count
    spread: Seconds = 0.0
    random: bool = False


class SavedTensor(Struct, frozen=True, array_like=True, gc=False):
    """A tensor that autograd saved for backward: a view of a storage, `offset` and strides in elements.

    `saver` is the operator whose gradient needs it, or -1 if that operator is not part of this step. `packed`
    is the last operator before it was saved, -1 before the first: autograd saves an operator's inputs before
    the operator runs, its outputs afterwards. `unpacked` is the operator that runs right after backward first
    unpacks it, -1 if it never does; `asked` counts how often it does. `hooked`: hooks of the script packed
    it, which those of a technique would hide.
    """

    storage: Count
    dtype: Text
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: Count
    packed: Index
    unpacked: Index
    asked: Count
    saver: Index = -1
    hooked: bool = False


class Storage(Struct, frozen=True, array_like=True, gc=False):
    """A storage, live during operators `birth <= i < death`.

    `pool` is `"device"` for the memory that the profile measures. In a GPU profile, host memory is `"pinned"`
    or `"host"`, and mapped files are `"file"`; no figure of the profile counts them.

    `birth` is -1 if it was live before the step; `death` is the number of operators if it outlives the step.
    `name` is the name of the parameter, buffer or optimizer state, else empty. `kept`: a Python reference,
    such as a local variable, kept this output of a forward operator alive until just before operator `kept`;
    -1 if not known.
    """

    bytes: Count
    kind: Kind
    birth: Index
    death: Count
    device: Text
    name: Text
    pool: Text = DEVICE_POOL
    kept: Index = -1

    @property
    def counted(self) -> int:
        """Its bytes if it is in the memory that the profile measures, else 0."""
        return self.bytes if self.pool == DEVICE_POOL else 0


class Module(Struct, frozen=True, array_like=True, gc=False):
    """A module of a root. `chain`: its children run in sequence (`nn.Sequential`).

    `hooked`: it has user hooks. `writes`: the state its code writes beyond its own tensors and attributes,
    and the line; rerunning the module would write it twice. `made`: the place that constructed it, an index
    or -1. `hooked_with_all`: its only hooks are those on the forward of all modules. `rereads`: its code may
    read a tensor that its last call left in an attribute. `appends`: its writes only append to lists that it
    does not read, so a rerun can take back its own.
    """

    path: Text
    type: Text
    parent: Index
    chain: bool
    hooked: bool
    parameter_bytes: Count
    writes: Text = ""
    made: Index = -1
    hooked_with_all: bool = False
    rereads: bool = True
    appends: bool = False


class Call(Struct, frozen=True, array_like=True, gc=False):
    """One forward call of a module: operators `first <= i < last`; `depth` is 0 for a root.

    `inputs` and `outputs` are the storages of its input and output tensors, `held` those of tensors inside
    objects passed as arguments, such as a key-value cache. `graded`: gradients were enabled.
    """

    module: Count
    first: Count
    last: Count
    depth: Count
    inputs: tuple[Count, ...]
    outputs: tuple[Count, ...]
    graded: bool
    held: tuple[Count, ...] = ()


class FunctionCall(Struct, frozen=True, array_like=True, gc=False):
    """A call of a function: operators `first <= i < last`. `graded`: gradients were enabled."""

    first: Count
    last: Count
    graded: bool


class Function(Struct, frozen=True, array_like=True, gc=False):
    """A function at the top level of a module of the user's source: `name` is `module.function`.

    `path` and `line` are where it is defined. `writes` and `appends`: the state that its code writes, as of
    a `Module`.
    """

    name: Text
    path: Text
    line: Count
    calls: tuple[FunctionCall, ...]
    writes: Text = ""
    appends: bool = False


class CompiledFunction(Struct, frozen=True, kw_only=True):
    """A function that torch.compile compiled in several of the steps watched, or behind a graph break.

    `function`: its name, `""` if it is a library's, as of a compiled module. `path` and `line`: the user's
    line, `""` and 0 if there is none. `steps`: those in which it was compiled, of `watched`. `seconds`: of
    compiling it again, in all steps after the first. `guard`: torch's words for what had changed last.
    `broken`: it is the rest of the function, behind a graph break in this line.
    """

    function: Text
    path: Text
    line: Count
    steps: Count
    watched: Count
    seconds: Seconds
    guard: Text
    broken: bool = False


class Update(Struct, frozen=True, array_like=True, gc=False):
    """A parameter that an optimizer updated: the storages of the parameter, its gradient and its states.

    `group` is its parameter group. `ready` is the operator that runs right after the last accumulation into
    the gradient, -1 if that was before the step; `added` counts the accumulations in the step.
    """

    parameter: Count
    gradient: Count
    states: tuple[Count, ...]
    group: Count
    ready: Index
    added: Count


class OptimizerStep(Struct, frozen=True, array_like=True, gc=False):
    """One call of an optimizer's `step`: operators `first <= i < last`, and its updates in order.

    `optimizer` is its name in plans, `type` its qualified class name. `hooked`: it has user step hooks.
    `skipped`: the line where the program may continue after a backward without this call, or empty.
    """

    optimizer: Text
    type: Text
    first: Count
    last: Count
    updates: tuple[Update, ...]
    hooked: bool
    skipped: Text = ""


class Place(Struct, frozen=True, array_like=True, gc=False):
    """A line of source."""

    path: Text
    line: Count
    function: Text


class LoaderWait(Struct, frozen=True, array_like=True, gc=False):
    """Time the step waited for its data loader."""

    start: Seconds
    seconds: Seconds
    workers: Count


class Sync(Struct, frozen=True, array_like=True, gc=False):
    """A host-device sync, or a read of data that may not have arrived yet.

    `row` names the row of the table in `syncs` that explains it. `operator` is the operator that waits, or -1
    for a call such as `torch.cuda.synchronize()`, which has its own `phase`, `place` and `caller`.
    `seconds` is the time the host was blocked, None without a device.
    """

    row: Text
    operator: Index
    phase: Phase
    place: Index
    caller: Index
    seconds: Seconds | None


class Growth(Struct, frozen=True, array_like=True, gc=False):
    """A container that a stream fills and never empties. `bytes` and `entries` are added per frame.

    `name` is the expression that reaches it, as a person would write it; `kind` is `dict`, `list`, `tensor`
    for one growing tensor, or `graph` for tensors held by autograd alone. `adapter` is the function of
    `torchtrim.stream` that bounds it, or empty. `place` and `caller` are indices, or -1.
    """

    name: Text
    kind: Text
    bytes: Count
    entries: Rate
    adapter: Text
    place: Index
    caller: Index


class Collective(Struct, frozen=True, array_like=True, gc=False):
    """A collective operation. `operator` launches it and returns at once.

    `group` names the process group, `ranks` is its size, 0 if unknown. `bytes` is this rank's input or, if it
    has none, its output. `start` counts from the start of the step; `seconds` is its duration, None if
    unknown.
    """

    name: Text
    operator: Count
    group: Text
    ranks: Count
    bytes: Count
    start: Seconds
    seconds: Seconds | None


class Replica(Struct, frozen=True, array_like=True, gc=False):
    """A module in `DistributedDataParallel`: `module` is the index of the wrapper, the rest are its settings.

    `gradient_bytes` is the size of one gradient exchange. `unused_bytes` is the size of the parameters that
    did not contribute to the loss, the largest of all watched steps. `first_bytes`: the size of the first
    bucket if it differs from `bucket_bytes`, else 0.
    """

    module: Count
    bucket_bytes: Count
    gradient_bytes: Count
    unused_bytes: Count
    find_unused: bool
    static_graph: bool
    bucket_views: bool
    first_bytes: Count = 0


class Overheads(Struct, frozen=True, kw_only=True):
    """Host overhead of recomputation beyond operator time, in seconds, on the machine of the profile.

    Per rerun part, per operator in it, per recomputed tensor, and per operator watched for recomputation.
    """

    part: Seconds
    operator: Seconds
    tensor: Seconds
    watched: Seconds


class Profile(Struct, frozen=True, kw_only=True, weakref=True):
    """The record of one step or, if it has `growths`, of the frames of a stream.

    `saved` has the tensors autograd saved in the step; the list is complete if `saved_known`. `rank` is this
    process's rank of `world`; `clock` is the start of the step, in seconds on the clock that the ranks of a
    machine share. Times come from `recorded_steps` steps with the same operators, everything else from one
    step. `loader` is the cost of the step's data loader without the recorder, None if not measured.
    `compiled` has functions that were compiled again or in parts, in a run with its torch.compile on.
    """

    schema_version: Literal[2] = 2
    torchtrim: Text
    torch: Text
    device: Text
    script: Text
    project: Text
    step_seconds: Seconds
    peak_bytes: Count
    tracked_peak_bytes: Count
    reserved_bytes: Count | None
    rss_bytes: Count | None
    operators: list[Operator]
    storages: list[Storage]
    modules: list[Module]
    calls: list[Call]
    places: list[Place]
    labels: list[Text]
    waits: list[LoaderWait]
    syncs: list[Sync] = []
    growths: list[Growth] = []
    saved: list[SavedTensor] = []
    saved_known: bool = False
    optimizer_steps: list[OptimizerStep] = []
    rank: Count = 0
    world: Annotated[int, Meta(ge=1, le=2**31)] = 1
    recorded_steps: Annotated[int, Meta(ge=1, le=2**31)] = 1
    clock: Seconds = 0.0
    collectives: list[Collective] = []
    replicas: list[Replica] = []
    loader: LoaderCost | None = None
    overheads: Overheads | None = None
    functions: list[Function] = []
    compiled: list[CompiledFunction] = []

    def place_of(self, operator: int) -> Place | None:
        """Return the call site of the operator: the line of user code if there is one, else the library's."""
        op = self.operators[operator]
        index = op.caller if op.caller >= 0 else op.place
        return self.places[index] if index >= 0 else None

    def module_of(self, operator: int) -> str:
        """Return the path of the module that ran the operator, or an empty string."""
        index = self.operators[operator].module
        return self.modules[index].path if index >= 0 else ""


def is_emulated(device: str) -> bool:
    """Return True if a profile's device is emulated: `"emulated"`, or `"emulated a10g"` for a named one."""
    return device.partition(" ")[0] == "emulated"


def check(profile: Profile) -> str | None:
    """Return the first error in the profile's indices, or None. msgspec has checked types and ranges."""
    return next(chain(_index_errors(profile), _range_errors(profile)), None)


_POINTERS = {
    "operators": {
        **dict.fromkeys(("place", "caller"), "places"),
        **{"module": "modules", "label": "labels", "forward": "operators"},
    },
    "syncs": {"operator": "operators", "place": "places", "caller": "places"},
    "modules": {"made": "places"},
    "calls": {"module": "modules"},
    "saved": {"storage": "storages", **dict.fromkeys(("packed", "unpacked", "saver"), "operators")},
    "growths": dict.fromkeys(("place", "caller"), "places"),
    "collectives": {"operator": "operators"},
    "replicas": {"module": "modules"},
}
"""The fields that are indices into a table, by the list they are in."""


def _index_errors(profile: Profile) -> Iterator[str]:
    """Yield indices that are beyond their table, in words."""
    names = ("operators", "storages", "modules", "places", "labels")
    counts = {name: len(getattr(profile, name)) for name in names}
    for rows, pointers in _POINTERS.items():
        for i, row in enumerate(getattr(profile, rows)):
            for field, table in pointers.items():
                index = getattr(row, field)
                if not -1 <= index < counts[table]:
                    where = f"{rows}[{i}].{field}"
                    yield f"`{where}` is {index}, and `{table}` has {counts[table]} entries"
    count = len(profile.storages)
    for where, storages in _storages(profile):
        yield from (
            f"`{where}` is {index}, and `storages` has {count} entries"
            for index in storages
            if not 0 <= index < count
        )


def _storages(profile: Profile) -> Iterator[tuple[str, Iterable[int]]]:
    for i, op in enumerate(profile.operators):
        for uses in (op.inputs, op.outputs):
            yield f"operators[{i}] tensor.storage", (use.storage for use in uses)
        yield f"operators[{i}].mutates", op.mutates
    for i, call in enumerate(profile.calls):
        yield f"calls[{i}] tensor", (*call.inputs, *call.outputs, *call.held)
    for i, step in enumerate(profile.optimizer_steps):
        for update in step.updates:
            last = max(update.parameter, update.gradient, *update.states)
            yield f"optimizer_steps[{i}] update", (last,)


def _range_errors(profile: Profile) -> Iterator[str]:
    """Yield ranges of operators, parents and views that contradict the profile, in words."""
    count = len(profile.operators)
    for i, life in enumerate(profile.storages):
        if not -1 <= life.birth <= life.death <= count:
            yield f"`storages[{i}]` lives from {life.birth} to {life.death} of {count} operators"
    for i, call in enumerate(profile.calls):
        if not call.first <= call.last <= count:
            yield f"`calls[{i}]` spans {call.first} to {call.last} of {count} operators"
    for i, function in enumerate(profile.functions):
        for one in function.calls:
            if not one.first <= one.last <= count:
                yield f"`functions[{i}]` spans {one.first} to {one.last} of {count} operators"
    for i, module in enumerate(profile.modules):
        if not -1 <= module.parent < i:
            yield f"`modules[{i}].parent` is {module.parent}; a parent must precede its children"
    for i, saved in enumerate(profile.saved):
        if len(saved.shape) != len(saved.strides):
            yield f"`saved[{i}]` has {len(saved.shape)} sizes and {len(saved.strides)} strides"
    for i, step in enumerate(profile.optimizer_steps):
        at = f"optimizer_steps[{i}]"
        if not step.first <= step.last <= count:
            yield f"`{at}` spans {step.first} to {step.last} of {count} operators"
        for update in step.updates:
            if update.ready > count:
                yield f"`{at}` has a gradient ready at {update.ready} of {count} operators"
