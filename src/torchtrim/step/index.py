"""Lookup tables of a step for techniques: calls by module, children, readers and writers of tensors."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from functools import cached_property
from itertools import accumulate

from torchtrim.records.profile import Profile
from torchtrim.records.remembered import remembered
from torchtrim.step.from_profile import step_of
from torchtrim.step.step import Span, Step, StepCall, Task

_ADD = "aten::add_."
_BEGINS = "aten::ones_like"
"""Creates the gradient of a loss, before autograd runs its graph."""
_WITHIN = ("backward", "recompute", "optimizer")
"""Phases of tasks within a pass of backward: hooks on gradients may step an optimizer."""


class StepIndex:
    """Tables of a step, each built on first access.

    A remembered index must not keep the step alive, so it refers only to parts of the step.
    """

    def __init__(self, step: Step) -> None:
        self._tasks = step.tasks
        self._tensors = step.tensors
        self._modules = step.modules
        self._all_calls = step.calls

    @cached_property
    def calls(self) -> tuple[tuple[StepCall, ...], ...]:
        """For each module, its forward calls in order, including calls that run no task."""
        found: list[list[StepCall]] = [[] for _ in self._modules]
        for call in self._all_calls:
            found[call.module].append(call)
        return tuple(map(tuple, found))

    @cached_property
    def running_calls(self) -> tuple[tuple[StepCall, ...], ...]:
        """For each module, the forward calls that run at least one task."""
        return tuple(
            tuple(call for call in calls if call.span.last > call.span.first)
            for calls in self.calls
        )

    @cached_property
    def graded_calls(self) -> tuple[tuple[StepCall, ...], ...]:
        """For each module, the forward calls that run at least one task with gradients enabled."""
        return tuple(tuple(call for call in calls if call.graded) for calls in self.running_calls)

    @cached_property
    def children(self) -> tuple[tuple[int, ...], ...]:
        """For each module, its children in order."""
        found: list[list[int]] = [[] for _ in self._modules]
        for number, module in enumerate(self._modules):
            if module.parent >= 0:
                found[module.parent].append(number)
        return tuple(map(tuple, found))

    @cached_property
    def runs_once(self) -> frozenset[int]:
        """Modules that must not run more often than the program runs them, and modules that contain one."""
        return self._with_owners(number for number, m in enumerate(self._modules) if m.runs_once)

    @cached_property
    def never_reruns(self) -> frozenset[int]:
        """Modules that must not run again even if lists are put back, and modules that contain one."""
        return self._with_owners(number for number, m in enumerate(self._modules) if m.never_reruns)

    def _with_owners(self, modules: Iterable[int]) -> frozenset[int]:
        found: set[int] = set()
        for number in modules:
            while number >= 0 and number not in found:
                found.add(number)
                number = self._modules[number].parent
        return frozenset(found)

    @cached_property
    def hooked_tensors(self) -> frozenset[int]:
        """The inputs and outputs of modules with user hooks."""
        hooked = [call for call in self._all_calls if self._modules[call.module].hooked]
        return frozenset(n for call in hooked for n in (*call.inputs, *call.outputs))

    @cached_property
    def passes(self) -> tuple[int, ...]:
        """For each task, a number that is the same for all tasks of one pass of backward."""
        begun = (
            task.phase not in _WITHIN or (task.of < 0 and task.name.startswith(_BEGINS))
            for task in self._tasks
        )
        return tuple(accumulate(begun))

    @cached_property
    def added(self) -> frozenset[int]:
        """Gradients that backward adds to an earlier pass's or call's."""
        return frozenset(
            number
            for task in self._tasks
            if task.phase == "backward" and task.name.startswith(_ADD)
            if any(self._tensors[written].kind == "gradient" for written in task.writes)
            for number in {*task.reads} - {*task.writes}
        )

    @cached_property
    def readers(self) -> dict[int, tuple[int, ...]]:
        """For each tensor, the tasks that read it."""
        return self._tasks_by_tensor(lambda task: task.reads)

    @cached_property
    def writers(self) -> dict[int, tuple[int, ...]]:
        """For each tensor, the tasks that change it in place."""
        return self._tasks_by_tensor(lambda task: task.writes)

    @cached_property
    def users(self) -> dict[int, tuple[int, ...]]:
        """For each tensor, the tasks that read it or return it, directly or as a view."""
        return self._tasks_by_tensor(lambda task: dict.fromkeys((*task.reads, *task.makes)))

    def child_calls(self, call: StepCall) -> tuple[StepCall, ...]:
        """Return the calls of a module's children within one of its calls, in order: one for each child.

        The result is empty if a child runs more than once in the call, or not at all.
        """
        children = self.children[call.module]
        first, last = call.span
        calls = (inner for child in children for inner in self.running_calls[child])
        inside = [inner for inner in calls if first <= inner.span.first and inner.span.last <= last]
        inside.sort(key=lambda inner: inner.span)
        return tuple(inside) if len(inside) == len(children) else ()

    def _tasks_by_tensor(
        self, tensors: Callable[[Task], Iterable[int]]
    ) -> dict[int, tuple[int, ...]]:
        found: defaultdict[int, list[int]] = defaultdict(list)
        for index, task in enumerate(self._tasks):
            for tensor in tensors(task):
                found[tensor].append(index)
        return {tensor: tuple(tasks) for tensor, tasks in found.items()}


@remembered
def index_of(step: Step) -> StepIndex:
    """Return the index of a step, the same one each time."""
    return StepIndex(step)


def recorded_index(profile: Profile) -> StepIndex:
    """Return the index of the step that a profile recorded, without edits."""
    return index_of(step_of(profile))


def graded_roots(step: Step, fits: Callable[[Span], bool]) -> dict[str, tuple[Span, ...]]:
    """Return the roots whose calls with gradients enabled have spans that fit, with these spans."""
    found: dict[str, tuple[Span, ...]] = {}
    for call in step.calls:
        module = step.modules[call.module]
        if module.parent < 0 and call.graded and fits(call.span):
            found[module.path] = (*found.get(module.path, ()), call.span)
    return found


def passes_of(step: Step, span: Span) -> list[list[int]]:
    """Return the tasks of each backward through a span, and the reruns of the script's checkpoints.

    A retained graph has several.
    """
    numbers, found = index_of(step).passes, defaultdict[int, list[int]](list)
    every = {task for one in range(*span) for task in step.backward.get(one, ())}
    for task in sorted(every - {*range(*span)}):
        found[numbers[task]].append(task)
    return [_with_reruns(step, tasks) for tasks in found.values()]


def _with_reruns(step: Step, backward: list[int]) -> list[int]:
    """Add the tasks that rerun forward before the first of these, and between them."""
    first, tasks = backward[0], step.tasks
    while tasks[first - 1].phase == "recompute":
        first -= 1
    between = range(first, backward[-1])
    return sorted({*backward, *(one for one in between if tasks[one].phase == "recompute")})


def joined_span(calls: tuple[StepCall, ...]) -> Span:
    """Return the span from the first of several consecutive calls to the last."""
    return Span(calls[0].span.first, calls[-1].span.last)
