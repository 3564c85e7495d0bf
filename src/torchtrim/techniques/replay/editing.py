"""What dropping tensors and making them again changes in a step."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import NamedTuple

from torchtrim.records.operator_names import base_name
from torchtrim.step.edits import Block, Drop, Edit, Insert, Need
from torchtrim.step.step import DEVICE, Span, Step
from torchtrim.techniques.replay import norms
from torchtrim.techniques.replay.groups import GroupCall
from torchtrim.techniques.replay.reading import Made
from torchtrim.techniques.replay.table import BATCH_NORMS, NAMESPACE

_BATCH_NORMS = frozenset(f"{NAMESPACE}{name}" for name in BATCH_NORMS)
_PACKING, _UNPACKING = 0.10, 0.12
"""What it takes to make bits of noise, and noise of bits, as shares of drawing it: within the steps of a T5
and a BERT on an Intel Xeon 0.57, 0.68 and 5.6 ns an element."""


class _Again(NamedTuple):
    """A tensor that is made again just before task `at`, and held until task `until`.

    `kept`: until when what it is made from must be kept, which is when autograd lets go of the recipe.
    """

    made: Made
    at: int
    until: int
    kept: int


def edit_of(step: Step, group: GroupCall) -> Edit:
    """The edit of one call: dropped, made again when first asked for, held until last asked for."""
    again = _moments(group.members)
    by_moment: defaultdict[int, list[_Again]] = defaultdict(list)
    for one in again:
        by_moment[one.at].append(one)
    noise = [one for one in again if one.made.elements]
    inserts = (_insert(step, at, several) for at, several in sorted(by_moment.items()))
    return Edit(
        drops=tuple(Drop(m.tensor, place) for m in group.members for place, _ in m.holds),
        needs=tuple(_needs(step, again)),
        blocks=(
            *(
                Block(step.tensors[one.made.tensor].bytes, one.at, one.until)
                for one in again
                if one.until > one.at
            ),
            *(Block(one.made.elements // 8, one.made.packed, one.kept) for one in noise),
        ),
        inserts=(
            *inserts,
            *(_packing(step, one.made) for one in noise),
            Insert(group.call.span.first, _watching(step, group), 0),
        ),
        claims=tuple(Span(task, task + 1) for task in sorted({*group.tasks, *group.savers})),
    )


def _watching(step: Step, group: GroupCall) -> float:
    """Seconds that watching the call takes, shared among the groups that are found in it."""
    operators = group.call.span.last - group.call.span.first
    return operators * step.overhead.watched / group.sharing


def _moments(members: tuple[Made, ...]) -> list[_Again]:
    """When each is made again: when backward asks for it, or for the first that is made from it."""
    found: dict[int, _Again] = {}
    for made in reversed(members):
        users = [one for one in found.values() if made.tensor in one.made.inputs]
        asked = [one.at for one in users] + ([made.asked] if made.asked >= 0 else [])
        if asked:
            until = max((made.until, *(one.at for one in users)))
            kept = max((made.until, *(one.kept for one in users)))
            found[made.tensor] = _Again(made, min(asked), until, kept)
    return [found[made.tensor] for made in members if made.tensor in found]


def _needs(step: Step, again: list[_Again]) -> list[Need]:
    """What is kept to make the others from it."""
    own = {one.made.tensor for one in again}
    until: defaultdict[int, int] = defaultdict(int)
    for one in again:
        for number in one.made.inputs:
            if number not in own and step.tensors[number].pool == DEVICE:
                until[number] = max(until[number], one.kept)
    return [Need(number, until) for number, until in until.items()]


class _Run(NamedTuple):
    """An operator that runs again: how high memory rises, and whether it is the one that allocates."""

    rise: int
    seconds: float
    first: bool


def _runs(step: Step, made: Made) -> Iterator[_Run]:
    tasks = made.tasks
    if made.elements:
        size = step.tensors[made.tensor].bytes
        seconds = step.tasks[tasks[1]].seconds * _UNPACKING
        yield _Run(size + made.elements, seconds, first=True)
        tasks = tasks[2:]
    for task in tasks:
        found = step.tasks[task]
        seconds = found.seconds * _share(step, task)
        yield _Run(found.transient, seconds, task == made.tasks[0])


def _share(step: Step, task: int) -> float:
    """What an operator takes that runs again, as a share of what it took at first."""
    if base_name(step.tasks[task].name) not in _BATCH_NORMS:
        return 1.0
    assert step.profile is not None
    return norms.share(step.operators[task], step.profile.device)


def _packing(step: Step, made: Made) -> Insert:
    """Noise becomes bits in forward, just before the first operator that it is saved for."""
    size = made.elements // 8
    seconds = step.tasks[made.tasks[1]].seconds * _PACKING
    return Insert(made.packed, seconds, made.elements + size, size)


def _insert(step: Step, at: int, several: list[_Again]) -> Insert:
    """The tasks that run again at one moment, in their order. What nobody holds goes after its last use."""
    here = {one.made.tensor: one for one in several}
    last = {number: one for one in several for number in one.made.inputs if number in here}
    level, rise, seconds = 0, 0, 0.0
    for one in several:
        size = step.tensors[one.made.tensor].bytes
        for run in _runs(step, one.made):
            rise = max(rise, level + run.rise)
            level += size if run.first else 0
            seconds += run.seconds + step.overhead.task
        done = (here[n] for n, user in last.items() if user is one and here[n].until <= at)
        level -= sum(step.tensors[each.made.tensor].bytes for each in done)
    makes = sum(step.tensors[n].bytes for n, one in here.items() if one.until > at)
    return Insert(at, seconds + len(several) * step.overhead.recipe, max(rise, level), makes)
