"""Conjugates of complex tensors that backward computes, and recipes hand over conjugated already."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from torchtrim.records.operator_names import base_name
from torchtrim.step.edits import Drop, Rise, drops_of
from torchtrim.step.step import Step
from torchtrim.techniques.replay.reading import Remake
from torchtrim.techniques.replay.table import CONJUGATING, NAMESPACE


class SparedConjugates(NamedTuple):
    """What backward no longer copies, and the bytes that its operators still make."""

    drops: tuple[Drop, ...]
    rises: tuple[Rise, ...]


def spared_conjugates(step: Step, again: Sequence[Remake]) -> SparedConjugates:
    """Return the copies that backward need not make of recomputed tensors to conjugate them."""
    tasks = [*dict.fromkeys(_conjugating_tasks(step, again))]
    copies = [task for task in tasks if base_name(step.tasks[task].name) == f"{NAMESPACE}clone"]
    made = {task: 0 if task in copies else _made_bytes(step, task) for task in tasks}
    return SparedConjugates(
        drops=(*drops_of(step, (number for task in copies for number in step.made_by[task])),),
        rises=tuple(Rise(task, count) for task, count in made.items()),
    )


def _conjugating_tasks(step: Step, again: Sequence[Remake]) -> Iterator[int]:
    nested = {number for made in again for number in made.inputs}
    for made in (one for one in again if one.tensor not in nested):
        savers = [saver for saver in made.savers if saver >= 0]
        if all(_conjugates(step, saver) for saver in savers):
            every = (task for saver in savers for task in step.backward.get(saver, ()))
            yield from (task for task in every if _reads_conjugate(step, task, made.tensor))


def _conjugates(step: Step, saver: int) -> bool:
    """Return True if the gradient of a task conjugates what it has saved."""
    return base_name(step.tasks[saver].name).removeprefix(NAMESPACE) in CONJUGATING


def _reads_conjugate(step: Step, task: int, number: int) -> bool:
    """Return True if a task reads a tensor that the one before it conjugated."""
    before = step.tasks[task - 1]
    conjugated = base_name(before.name) == f"{NAMESPACE}_conj" and number in before.reads
    return conjugated and number in step.tasks[task].reads


def _made_bytes(step: Step, task: int) -> int:
    return sum(step.tensors[number].bytes for number in step.made_by[task])
