"""Edits: the change that an option makes to a step, as data, and the pools that edits put bytes into.

Every technique describes its effect on memory and time in these terms, so the simulator knows no technique by
name: holds that end, tensors needed longer, extra blocks, inserted work, trips to the host. Edits that claim
the same tasks conflict.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import NamedTuple

from torchtrim.memory.packing import Buffer, Packing, pack
from torchtrim.step.step import DEVICE, Hold, Span, Step, StepCall, Task, Tensor


class Drop(NamedTuple):
    """Ends hold number `hold` of a tensor: the tensor is no longer kept for that reason."""

    tensor: int
    hold: int


class Need(NamedTuple):
    """Keeps a tensor until task `until` begins."""

    tensor: int
    until: int


class Block(NamedTuple):
    """Extra bytes during tasks `first <= i < last`."""

    bytes: int
    first: int
    last: int
    pool: str = DEVICE


class Rise(NamedTuple):
    """The highest rise of memory while a task runs in another way, in bytes."""

    task: int
    bytes: int


class Insert(NamedTuple):
    """Work just before task `at`, which takes `seconds` on a lane.

    Memory rises by at most `rise` bytes above the bytes alive before it. `makes`: bytes of the edit's own
    blocks that it allocates, which are alive from `at` on.
    """

    at: int
    seconds: float
    rise: int
    makes: int = 0
    lane: str = "compute"


class Trip(NamedTuple):
    """A tensor's trip to the host and back over a link, which takes `seconds` each way.

    The copy out is queued when task `leaves` begins and awaited when `gone` begins; the copy back is queued
    at `back` and awaited at `asked`. Queueing one copy occupies compute for `queueing` seconds. `alone`: the
    stall of both copies together on an otherwise idle link.
    """

    bytes: int
    seconds: float
    leaves: int
    gone: int
    back: int
    asked: int
    queueing: float
    alone: float


class Edit(NamedTuple):
    """A change to a step. `claims`: the tasks that no other edit may change.

    `overwrites`: tasks that write their result over their input. They lead to another step (`overwritten`),
    and the edits to combine with them are found there.
    """

    drops: tuple[Drop, ...] = ()
    needs: tuple[Need, ...] = ()
    blocks: tuple[Block, ...] = ()
    inserts: tuple[Insert, ...] = ()
    rises: tuple[Rise, ...] = ()
    claims: tuple[Span, ...] = ()
    overwrites: tuple[int, ...] = ()
    trips: tuple[Trip, ...] = ()

    @property
    def work_seconds(self) -> float:
        """Seconds of all inserted work and of queueing copies."""
        queueing = sum(2 * trip.queueing for trip in self.trips)
        return sum(insert.seconds for insert in self.inserts) + queueing

    @property
    def seconds(self) -> float:
        """Seconds that the edit adds alone; `step.links` computes the sum for several."""
        return self.work_seconds + sum(trip.alone for trip in self.trips)


NOTHING = Edit()


def joined(edits: Iterable[Edit]) -> Edit:
    """Return several edits as one."""
    return Edit._make(map(tuple, map(chain.from_iterable, zip(NOTHING, *edits, strict=True))))


def drops_of(step: Step, numbers: Iterable[int]) -> tuple[Drop, ...]:
    """Return the drops that end every hold of these tensors."""
    return tuple(Drop(n, hold) for n in numbers for hold in range(len(step.tensors[n].holds)))


def joined_if_all(edits: Iterable[Edit | None]) -> Edit | None:
    """Return several edits as one, or None without edits or if one is None."""
    parts = []
    for edit in edits:
        if edit is None:
            return None
        parts.append(edit)
    return joined(parts) if parts else None


ALIGNMENT = 256  # Bytes; offsets in a host block are aligned like CUDA's allocations.


PINNED = "pinned"  # The pool of pinned host memory.
FILE = "file"  # The pool of memory-mapped files, which no budget limits.
DISK = 2e9  # Bytes per second of a file: the sustained write rate that makers of NVMe drives state.


def host_blocks(edit: Edit) -> list[Block]:
    """Return the blocks that an edit puts into host memory or a file."""
    return [block for block in edit.blocks if block.pool != DEVICE]


def packed(blocks: Sequence[Block]) -> Packing:
    """Return the offsets of blocks in one buffer, by their numbers."""
    buffers = [
        Buffer(number, block.first, block.last, block.bytes, ALIGNMENT)
        for number, block in enumerate(blocks)
    ]
    return pack(buffers, seconds=0)


def host_peak(edits: Iterable[Edit]) -> int:
    """Return the bytes of the host block that edits need together."""
    blocks = (block for edit in edits for block in host_blocks(edit))
    return packed([block for block in blocks if block.pool != FILE]).height


_COPY = "aten::clone"


def overwritten(step: Step, tasks: Iterable[int]) -> Step:
    """Return the step whose `tasks` write their result over their input, two tensors of one size.

    They become one, which keeps the number of the input and lives as long as either is held. A task that
    clones a tensor just before the next task overwrites it disappears: the tensor that autograd saved from
    the clone is then the result of the next task.
    """
    heirs: dict[int, int] = {}
    changed: dict[int, Task] = {}
    tensors = list(step.tensors)
    for index in sorted(tasks):
        task = step.tasks[index]
        (read,), (made,) = task.reads, task.makes
        kept = heirs.get(read, read)
        heirs[made] = kept
        if task.name.startswith(_COPY):
            tensors[made] = _of_next(tensors[made], index + 1)
        holds = (*tensors[kept].holds, *tensors[made].holds)
        tensors[kept] = tensors[kept]._replace(kind=tensors[made].kind, holds=holds)
        tensors[made] = tensors[made]._replace(bytes=0, holds=(Hold(index + 1),))
        rise = max(task.transient - tensors[kept].bytes, 0)
        changed[index] = task._replace(writes=(kept,), transient=rise)
        if task.name.startswith(_COPY):
            changed[index] = task._replace(name="", makes=(), seconds=0.0, transient=0)
    if not heirs:
        return step
    every = (changed.get(index, task) for index, task in enumerate(step.tasks))
    return replace(
        step,
        tasks=tuple(_task(task, heirs) for task in every),
        tensors=tuple(tensors),
        calls=tuple(_call(call, heirs) for call in step.calls),
    )


def _of_next(copy: Tensor, writer: int) -> Tensor:
    """Return the clone with its saved holds moved to the task that overwrites the original."""
    return copy._replace(
        holds=tuple(
            hold._replace(saver=writer, packed=max(hold.packed, writer))
            if hold.saver >= 0
            else hold
            for hold in copy.holds
        )
    )


def _task(task: Task, heirs: Mapping[int, int]) -> Task:
    return task._replace(
        reads=_of(task.reads, heirs), makes=_of(task.makes, heirs), writes=_of(task.writes, heirs)
    )


def _call(call: StepCall, heirs: Mapping[int, int]) -> StepCall:
    inputs, held = _of(call.inputs, heirs), _of(call.held, heirs)
    return call._replace(inputs=inputs, outputs=_of(call.outputs, heirs), held=held)


def _of(numbers: tuple[int, ...], heirs: Mapping[int, int]) -> tuple[int, ...]:
    if heirs.keys().isdisjoint(numbers):
        return numbers
    return tuple(heirs.get(number, number) for number in numbers)
