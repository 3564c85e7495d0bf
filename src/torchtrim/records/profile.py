"""A profile: the record of one step. Plain data; no torch is needed to read, draw or plan from it."""

from __future__ import annotations

from typing import Annotated, Literal, get_args

import msgspec
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
DEVICE_POOL = "device"


class TensorUse(Struct, frozen=True, array_like=True, gc=False):
    """A tensor as an operator saw it: which storage, and the view of it. Strides are in elements."""

    storage: Count
    dtype: Text
    shape: tuple[int, ...]
    strides: tuple[int, ...]


class Operator(Struct, frozen=True, array_like=True, gc=False):
    """One ATen operator. `module`, `place`, `caller`, `label` and `forward` are indices, -1 for none.

    `forward` is the operator whose gradient a backward operator computes; its place and module are this
    one's too. `transient_bytes` is the highest that memory rose inside the operator, its outputs
    included. `start` counts from the start of the step. `seconds` is the median of the profile's
    `recorded_steps`, `spread` their largest minus their smallest. `random`: it draws random numbers.
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

    `saver` is the operator whose gradient needs it, -1 if none of this step. `packed` is the operator
    after which it was saved: autograd saves an operator's inputs before it runs, its results afterwards;
    -1 before the first. `unpacked` is the operator that runs next when backward first asks for it, -1 for
    never, and `asked` is how often backward does.
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


class Storage(Struct, frozen=True, array_like=True, gc=False):
    """A block of memory, alive during operators `birth <= i < death`.

    `pool` is where its bytes are: `"device"` for the memory that the profile is about; in a profile of a
    GPU's memory, host memory is in `"pinned"` or `"host"`, and counts for none of its figures. Nor does
    mappings of a `"file"`.

    `birth` is -1 for what was alive before the step; `death` is the number of operators for what
    outlives it. `name` is the parameter's, buffer's or state's, else empty. Python itself, in a local of a
    function, say, kept what an operator of forward made until before operator `kept`; -1: not known.
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
        """Its bytes where they lie in the memory that the profile is about, else 0."""
        return self.bytes if self.pool == DEVICE_POOL else 0


class Module(Struct, frozen=True, array_like=True, gc=False):
    """A module of a root. `chain`: its children run one after the other (`nn.Sequential`).

    `hooked`: it carries user hooks. `writes`: what its code writes beyond its own tensors and attributes, and
    where; running it twice would do that twice.
    """

    path: Text
    type: Text
    parent: Index
    chain: bool
    hooked: bool
    parameter_bytes: Count
    writes: Text = ""


class Call(Struct, frozen=True, array_like=True, gc=False):
    """One forward call of a module: operators `first <= i < last`; `depth` 0 for a root.

    `inputs` and `outputs` are the storages of the tensors that went in and came out, and `held` those that
    objects among its arguments had then, such as a cache of keys and values. `graded`: gradients were on.
    """

    module: Count
    first: Count
    last: Count
    depth: Count
    inputs: tuple[Count, ...]
    outputs: tuple[Count, ...]
    graded: bool
    held: tuple[Count, ...] = ()


class Update(Struct, frozen=True, array_like=True, gc=False):
    """A parameter that an optimizer updated: the storages of it, of its gradient and of its states.

    `group` is its parameter group. `ready` is the operator that runs next when the gradient was last added
    to, -1 for before the step, and `added` is how often the step did that.
    """

    parameter: Count
    gradient: Count
    states: tuple[Count, ...]
    group: Count
    ready: Index
    added: Count


class OptimizerStep(Struct, frozen=True, array_like=True, gc=False):
    """One call of an optimizer's `step`: operators `first <= i < last`, and what it updated, in its order.

    `optimizer` is its name in plans, `type` its class's with the module's. `hooked`: it carries the user's
    step hooks. `skipped`: where the program may go on from a backward without this call, empty for nowhere.
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
    """Time in which the step waited for its data loader."""

    start: Seconds
    seconds: Seconds
    workers: Count


class Sync(Struct, frozen=True, array_like=True, gc=False):
    """A host-device sync, or a read of data that may not have arrived yet.

    `row` names the row of `syncs` that says why. `operator` is the one that waits; -1 for a call
    of no operator, such as `torch.cuda.synchronize()`, whose `phase`, `place` and `caller` are its own.
    `seconds` is how long the host was blocked, None where no device was.
    """

    row: Text
    operator: Index
    phase: Phase
    place: Index
    caller: Index
    seconds: Seconds | None


class Growth(Struct, frozen=True, array_like=True, gc=False):
    """Something that a stream fills and never empties. `bytes` and `entries` are what a frame adds.

    `name` says where it is, as a person would write it; `kind` what it is: `dict`, `list`, `tensor` for one
    tensor that gets larger, `graph` for what only autograd holds. `adapter` is the function of
    `torchtrim.stream` that bounds it, empty for none. `place` and `caller` are indices, -1 for none.
    """

    name: Text
    kind: Text
    bytes: Count
    entries: Rate
    adapter: Text
    place: Index
    caller: Index


class Collective(Struct, frozen=True, array_like=True, gc=False):
    """What a rank does together with others: operator `operator` begins it, and goes on at once.

    `group` names the ranks that take part, `ranks` says how many they are, 0 if unknown. `bytes` is what
    this rank gives or, where it gives nothing, gets. `start` counts from the start of the step; `seconds`
    is how long it was under way, None where that is not known.
    """

    name: Text
    operator: Count
    group: Text
    ranks: Count
    bytes: Count
    start: Seconds
    seconds: Seconds | None


class Replica(Struct, frozen=True, array_like=True, gc=False):
    """A module in `DistributedDataParallel`: `module` is the wrapper's index, the others its settings.

    `gradient_bytes` is what it exchanges once. `unused_bytes` is of parameters that had no part in the
    loss, the most of all steps that were watched. `first_bytes`: the size of the first bucket, where that is
    another than `bucket_bytes`; 0 where it is not.
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
    """What running again takes besides the operators' own seconds, on the machine of the profile: for each
    part that runs again and each operator in it, each tensor that is made again, and each operator that is
    watched for that."""

    part: Seconds
    operator: Seconds
    tensor: Seconds
    watched: Seconds


class Profile(Struct, frozen=True, kw_only=True, weakref=True):
    """The record of one step, or, where it has `growths`, of the frames of a stream.

    `saved` is what autograd saved in the step, complete where it is `saved_known`. `rank` is this
    process's of `world`; `clock` is when the step began, in seconds on the clock that the ranks of one
    machine share. Times are of `recorded_steps` steps with the same operators, all else of one. `loader` is
    what the step's loader costs where nothing is recorded, None where that was not measured.
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

    def place_of(self, operator: int) -> Place | None:
        """Where the operator was asked for, in the user's own source if it was, else in the library's."""
        op = self.operators[operator]
        index = op.caller if op.caller >= 0 else op.place
        return self.places[index] if index >= 0 else None

    def module_of(self, operator: int) -> str:
        """Path of the module that ran the operator; empty for none."""
        index = self.operators[operator].module
        return self.modules[index].path if index >= 0 else ""


def is_emulated(device: str) -> bool:
    """Whether a profile's device is emulated: `"emulated"`, or `"emulated a10g"` of a named one."""
    return device.partition(" ")[0] == "emulated"


def check(profile: Profile) -> str | None:
    """What is wrong with the profile's indices, or None. Types and ranges are msgspec's."""
    count = {
        "operators": len(profile.operators),
        "storages": len(profile.storages),
        "modules": len(profile.modules),
        "places": len(profile.places),
        "labels": len(profile.labels),
    }

    def wrong(where: str, index: int, table: str, low: int = -1) -> str | None:
        if low <= index < count[table]:
            return None
        return f"`{where}` is {index}, and `{table}` has {count[table]} entries"

    for i, op in enumerate(profile.operators):
        at = f"operators[{i}]"
        found = (
            wrong(f"{at}.module", op.module, "modules")
            or wrong(f"{at}.place", op.place, "places")
            or wrong(f"{at}.caller", op.caller, "places")
            or wrong(f"{at}.label", op.label, "labels")
            or wrong(f"{at}.forward", op.forward, "operators")
        )
        for use in (*op.inputs, *op.outputs):
            found = found or wrong(f"{at} tensor.storage", use.storage, "storages", 0)
        for storage in op.mutates:
            found = found or wrong(f"{at}.mutates", storage, "storages", 0)
        if found:
            return found
    for i, sync in enumerate(profile.syncs):
        at = f"syncs[{i}]"
        found = (
            wrong(f"{at}.operator", sync.operator, "operators")
            or wrong(f"{at}.place", sync.place, "places")
            or wrong(f"{at}.caller", sync.caller, "places")
        )
        if found:
            return found
    for i, life in enumerate(profile.storages):
        if not -1 <= life.birth <= life.death <= count["operators"]:
            return (
                f"`storages[{i}]` lives from {life.birth} to {life.death} "
                f"of {count['operators']} operators"
            )
    for i, call in enumerate(profile.calls):
        if not call.first <= call.last <= count["operators"]:
            return (
                f"`calls[{i}]` spans {call.first} to {call.last} of {count['operators']} operators"
            )
        found = wrong(f"calls[{i}].module", call.module, "modules", 0)
        for index in (*call.inputs, *call.outputs, *call.held):
            found = found or wrong(f"calls[{i}] tensor", index, "storages", 0)
        if found:
            return found
    for i, module in enumerate(profile.modules):
        if not -1 <= module.parent < i:
            return f"`modules[{i}].parent` is {module.parent}; a parent comes before its children"
    return _wrong_elsewhere(profile)


def _wrong_elsewhere(profile: Profile) -> str | None:
    return (
        _wrong_saved(profile)
        or _wrong_growth(profile)
        or _wrong_update(profile)
        or _wrong_exchange(profile)
    )


def _wrong_saved(profile: Profile) -> str | None:
    storages, operators = len(profile.storages), len(profile.operators)
    for i, saved in enumerate(profile.saved):
        if saved.storage >= storages:
            return f"`saved[{i}].storage` is {saved.storage}, and `storages` has {storages} entries"
        for name in ("packed", "unpacked", "saver"):
            if getattr(saved, name) >= operators:
                return (
                    f"`saved[{i}].{name}` is {getattr(saved, name)}, "
                    f"and `operators` has {operators} entries"
                )
        if len(saved.shape) != len(saved.strides):
            return f"`saved[{i}]` has {len(saved.shape)} sizes and {len(saved.strides)} strides"
    return None


def _wrong_growth(profile: Profile) -> str | None:
    count = len(profile.places)
    for i, growth in enumerate(profile.growths):
        for name, index in (("place", growth.place), ("caller", growth.caller)):
            if index >= count:
                return f"`growths[{i}].{name}` is {index}, and `places` has {count} entries"
    return None


def _wrong_update(profile: Profile) -> str | None:
    storages, operators = len(profile.storages), len(profile.operators)
    for i, step in enumerate(profile.optimizer_steps):
        at = f"optimizer_steps[{i}]"
        if not step.first <= step.last <= operators:
            return f"`{at}` spans {step.first} to {step.last} of {operators} operators"
        for update in step.updates:
            if max(update.parameter, update.gradient, *update.states) >= storages:
                return f"`{at}` names a storage, and `storages` has {storages} entries"
            if update.ready > operators:
                return f"`{at}` has a gradient ready at {update.ready} of {operators} operators"
    return None


def _wrong_exchange(profile: Profile) -> str | None:
    operators, modules = len(profile.operators), len(profile.modules)
    for i, one in enumerate(profile.collectives):
        if one.operator >= operators:
            return f"`collectives[{i}].operator` is {one.operator}, and `operators` has {operators} entries"
    for i, replica in enumerate(profile.replicas):
        if replica.module >= modules:
            return (
                f"`replicas[{i}].module` is {replica.module}, and `modules` has {modules} entries"
            )
    return None


def schema() -> dict[str, object]:
    """JSON Schema of a saved profile."""
    return msgspec.json.schema(Profile)
