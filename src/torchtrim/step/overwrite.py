"""The step in which tasks write their result over their input."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from torchtrim.step.step import Call, Hold, Step, Task, Tensor

_COPY = "aten::clone"


def overwritten(step: Step, tasks: Iterable[int]) -> Step:
    """The step as it would be; each of these tasks reads one tensor and makes one, of one size.

    The two become one: it keeps the number of the first, and lives as long as either is held. A task that
    copies what the next one writes over falls away: what autograd saved of the copy is the next one's result.
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
        tensors[kept] = _joined(tensors[kept], tensors[made])
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
    """The copy as it is saved of what writes over its original."""
    return copy._replace(
        holds=tuple(
            hold._replace(saver=writer, packed=max(hold.packed, writer))
            if hold.saver >= 0
            else hold
            for hold in copy.holds
        )
    )


def _joined(old: Tensor, new: Tensor) -> Tensor:
    """A tensor that holds first the one, then the other. What autograd saved of the old one is gone."""
    return old._replace(kind=new.kind, holds=(*old.holds, *new.holds))


def _task(task: Task, heirs: Mapping[int, int]) -> Task:
    return task._replace(
        reads=_of(task.reads, heirs), makes=_of(task.makes, heirs), writes=_of(task.writes, heirs)
    )


def _call(call: Call, heirs: Mapping[int, int]) -> Call:
    given, held = _of(call.inputs, heirs), _of(call.held, heirs)
    return call._replace(inputs=given, outputs=_of(call.outputs, heirs), held=held)


def _of(numbers: tuple[int, ...], heirs: Mapping[int, int]) -> tuple[int, ...]:
    if heirs.keys().isdisjoint(numbers):
        return numbers
    return tuple(heirs.get(number, number) for number in numbers)
