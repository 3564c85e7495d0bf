"""Candidates for replay: groups of tensors that are dropped and recomputed together."""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from torchtrim.records.remembered import remembered
from torchtrim.step.index import index_of
from torchtrim.step.simulate import simulate
from torchtrim.step.step import Span, Step, StepCall
from torchtrim.techniques.replay.places import OperatorOrdinal, ReplayPlace
from torchtrim.techniques.replay.reading import Remake, RemakeReader

_LEAST_SHARE = 0.001
"""Tensors below a thousandth of the peak are not worth a recipe: a hundred of them are a tenth."""
_LEAST_BYTES = 16_384
"""Below this the recipe, a few Python objects, is no longer small beside the tensor."""
_MOST_MEMBERS = 8  # Arbitrary: larger groups approach recompute of the whole module.
_DEEPEST = 3  # Arbitrary: deeper chains cost more reruns for each saved byte.


class GroupCall(NamedTuple):
    """Tensors of one module call that are dropped together, in the order of their creation.

    `sharing`: number of candidate tensors in that call, which share the cost of watching it.
    """

    members: tuple[Remake, ...]
    call: StepCall
    sharing: int

    @property
    def tasks(self) -> list[int]:
        """Tasks that rerun."""
        return sorted(task for made in self.members for task in made.tasks)

    @property
    def savers(self) -> list[int]:
        """Tasks that autograd saved the members for."""
        return sorted({saver for made in self.members for saver in made.savers})


class Group(NamedTuple):
    """The same operators in all calls of a module."""

    calls: tuple[GroupCall, ...]

    @property
    def spans(self) -> tuple[Span, ...]:
        """Spans of the calls."""
        return tuple(one.call.span for one in self.calls)


@remembered
def groups_of(step: Step) -> dict[str, Group]:
    """Return the groups of a step by place."""
    return _GroupFinder(step).groups() if step.profile is not None else {}


class _GroupFinder:
    def __init__(self, step: Step) -> None:
        assert step.profile is not None
        self._step = step
        self._reader = RemakeReader(step, step.profile)
        self._least = max(simulate(step).peak_bytes * _LEAST_SHARE, _LEAST_BYTES)
        self._graded = [call for call in step.calls if call.graded]
        self._places: defaultdict[str, list[int]] = defaultdict(list)
        for index, name in enumerate(self._reader.roles):
            if step.tasks[index].phase == "forward":
                self._places[name].append(index)
        self._nest()

    def _nest(self) -> None:
        """Find the innermost call of each task, and the parent of each call."""
        self._innermost: dict[int, StepCall] = {}
        self._outer: dict[StepCall, StepCall] = {}
        around: list[StepCall] = []
        for call in sorted(self._graded, key=lambda one: (one.span.first, -one.span.last)):
            while around and around[-1].span.last <= call.span.first:
                around.pop()
            if around:
                self._outer[call] = around[-1]
            around.append(call)
            for task in range(*call.span):
                self._innermost[task] = call

    def groups(self) -> dict[str, Group]:
        """Return the groups whose place is valid in every call of its module."""
        found: defaultdict[ReplayPlace, list[GroupCall]] = defaultdict(list)
        sets: dict[frozenset[int], tuple[tuple[Remake, ...], StepCall]] = {}
        wanted: defaultdict[StepCall, set[int]] = defaultdict(set)
        for target, members in self._sets():
            call = self._call_of(members)
            if call is not None:
                sets[frozenset(made.tensor for made in members)] = members, call
                wanted[call].add(target)
        for members, call in sets.values():
            group = GroupCall(members, call, len(wanted[call]))
            found[self._place(group)].append(group)
        return {
            str(place): Group(tuple(several))
            for place, several in found.items()
            if len(several) == self._graded_calls(several[0].call.module)
        }

    def _graded_calls(self, module: int) -> int:
        return sum(call.graded for call in index_of(self._step).calls[module])

    def _sets(self) -> Iterator[tuple[int, tuple[Remake, ...]]]:
        """Yield sets for each saved tensor: alone, with one of its inputs, with all of them, and further
        back.
        """
        for number in range(len(self._step.tensors)):
            if (target := self._worth(number)) is None:
                continue
            members = {target.tensor: target}
            for _ in range(_DEEPEST):
                if not self._add_missing(members):
                    break
                yield number, _in_order(members)
                more = self._remakeable_inputs(members)
                if not more:
                    break
                if len(more) > 1:
                    yield from ((number, _in_order(one)) for one in self._with_each(members, more))
                members = {**members, **more}

    def _with_each(
        self, members: dict[int, Remake], more: dict[int, Remake]
    ) -> Iterator[dict[int, Remake]]:
        """Yield the members plus one of their inputs: noise, for example, is cheaper than the rest."""
        for number, made in more.items():
            several = {**members, number: made}
            if self._add_missing(several):
                yield several

    def _worth(self, number: int) -> Remake | None:
        if self._step.tensors[number].bytes < self._least:
            return None
        made = self._reader.made(number)
        return made if made is not None and made.asked >= 0 else None

    def _add_missing(self, members: dict[int, Remake]) -> bool:
        """Add inputs of members that are freed by then. Return True if all members can be recomputed."""
        waiting, until = list(members.values()), _last(members.values())
        while waiting:
            made = waiting.pop()
            for number, task in self._reads(made):
                gone = number not in members and not self._is_kept(number, until)
                if gone and (more := self._reader.made(number)) is not None:
                    members[number] = more
                    waiting.append(more)
                if not self._keeps_value(number, task, members, until):
                    return False
        return len(members) <= _MOST_MEMBERS

    def _remakeable_inputs(self, members: dict[int, Remake]) -> dict[int, Remake]:
        """Return the inputs of members that can be recomputed too."""
        inputs = {n for made in members.values() for n in made.inputs if n not in members}
        return {n: made for n in sorted(inputs) if (made := self._reader.made(n)) is not None}

    def _reads(self, made: Remake) -> Iterator[tuple[int, int]]:
        """Yield the inputs of a tensor with the tasks that read them."""
        for task in made.tasks:
            for number in self._step.tasks[task].reads:
                if number in made.inputs:
                    yield number, task

    def _is_kept(self, number: int, until: int) -> bool:
        return self._reader.is_state(number) or self._step.tensors[number].death >= until

    def _keeps_value(self, number: int, task: int, members: dict[int, Remake], until: int) -> bool:
        """Return True if an input has its original value at the rerun."""
        if number in members:
            return self._reader.is_settled(members[number], task)
        return self._reader.is_unchanged(number, task, until)

    def _call_of(self, members: tuple[Remake, ...]) -> StepCall | None:
        """Return the innermost call that creates and saves the members, or None."""
        every = [task for made in members for task in (*made.tasks, *made.savers)]
        first, last = min(every), max(every)
        call = self._innermost.get(first)
        while call is not None and not self._holds(call, last):
            call = self._outer.get(call)
        return call

    def _holds(self, call: StepCall, last: int) -> bool:
        return last < call.span.last and not self._step.modules[call.module].hooked

    def _place(self, group: GroupCall) -> ReplayPlace:
        runs = (self._run(task, group.call.span.first) for task in group.tasks)
        return ReplayPlace(self._step.modules[group.call.module].path, tuple(runs))

    def _run(self, task: int, first: int) -> OperatorOrdinal:
        """Return the task's role, and its ordinal among tasks of that role since `first`."""
        name = self._reader.roles[task]
        among = self._places[name]
        return OperatorOrdinal(name, bisect_left(among, task) - bisect_left(among, first))


def _in_order(members: dict[int, Remake]) -> tuple[Remake, ...]:
    return tuple(sorted(members.values(), key=lambda made: made.tasks[0]))


def _last(members: Iterable[Remake]) -> int:
    """Return the end of the last backward task that needs one of these."""
    return max(made.until for made in members)
