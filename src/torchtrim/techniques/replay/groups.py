"""The places at which replay can save: tensors that are dropped and made again together."""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from torchtrim.records.remembered import remembered
from torchtrim.step.index import index_of
from torchtrim.step.simulate import simulate
from torchtrim.step.step import Call, Span, Step
from torchtrim.techniques.replay.places import Place, Run
from torchtrim.techniques.replay.reading import Made, RemakeReader

_LEAST_SHARE = 0.001
"""A tensor of less than a thousandth of the peak is not worth a recipe: a hundred of them are a tenth."""
_LEAST_BYTES = 16_384
"""Below that the recipe itself, a few objects of Python, is no longer small beside the tensor."""
_MOST_MEMBERS = 8
_DEEPEST = 3


class GroupCall(NamedTuple):
    """Tensors dropped together in one call of a module, in the order in which they were made.

    `sharing`: how many tensors are worth it in that call, which is watched for all of them.
    """

    members: tuple[Made, ...]
    call: Call
    sharing: int

    @property
    def tasks(self) -> list[int]:
        """The tasks that run again."""
        return sorted(task for made in self.members for task in made.tasks)

    @property
    def savers(self) -> list[int]:
        """The tasks that autograd saved for."""
        return sorted({saver for made in self.members for saver in made.savers})


class Group(NamedTuple):
    """The same operators in all calls of a module."""

    calls: tuple[GroupCall, ...]

    @property
    def spans(self) -> tuple[Span, ...]:
        """The tasks of the calls."""
        return tuple(one.call.span for one in self.calls)


@remembered
def groups_of(step: Step) -> dict[str, Group]:
    """The groups of a step by their places."""
    return _Finder(step).groups() if step.profile is not None else {}


class _Finder:
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
        """For each task the innermost call that it is in, and for each call the one around it."""
        self._innermost: dict[int, Call] = {}
        self._outer: dict[Call, Call] = {}
        around: list[Call] = []
        for call in sorted(self._graded, key=lambda one: (one.span.first, -one.span.last)):
            while around and around[-1].span.last <= call.span.first:
                around.pop()
            if around:
                self._outer[call] = around[-1]
            around.append(call)
            for task in range(*call.span):
                self._innermost[task] = call

    def groups(self) -> dict[str, Group]:
        """All groups whose place means the same in each call of its module."""
        found: defaultdict[Place, list[GroupCall]] = defaultdict(list)
        sets: dict[frozenset[int], tuple[tuple[Made, ...], Call]] = {}
        wanted: defaultdict[Call, set[int]] = defaultdict(set)
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

    def _sets(self) -> Iterator[tuple[int, tuple[Made, ...]]]:
        """For each saved tensor: itself, then with one of what it is made from, with all of that, and ever
        further back."""
        for number in range(len(self._step.tensors)):
            if (target := self._worth(number)) is None:
                continue
            members = {target.tensor: target}
            for _ in range(_DEEPEST):
                if not self._close(members):
                    break
                yield number, _in_order(members)
                more = self._makers(members)
                if not more:
                    break
                if len(more) > 1:
                    yield from ((number, _in_order(one)) for one in self._with_each(members, more))
                members = {**members, **more}

    def _with_each(
        self, members: dict[int, Made], more: dict[int, Made]
    ) -> Iterator[dict[int, Made]]:
        """The members with one more of what they are made from: noise, for one, is cheaper than the rest."""
        for number, made in more.items():
            several = {**members, number: made}
            if self._close(several):
                yield several

    def _worth(self, number: int) -> Made | None:
        if self._step.tensors[number].bytes < self._least:
            return None
        made = self._reader.made(number)
        return made if made is not None and made.asked >= 0 else None

    def _close(self, members: dict[int, Made]) -> bool:
        """Add what members are made from and would be gone by then; whether all can be made again."""
        waiting, until = list(members.values()), _last(members.values())
        while waiting:
            made = waiting.pop()
            for number, task in self._reads(made):
                gone = number not in members and not self._is_there(number, until)
                if gone and (more := self._reader.made(number)) is not None:
                    members[number] = more
                    waiting.append(more)
                if not self._is_right(number, task, members, until):
                    return False
        return len(members) <= _MOST_MEMBERS

    def _makers(self, members: dict[int, Made]) -> dict[int, Made]:
        """What members are made from and can be made again too."""
        inputs = {n for made in members.values() for n in made.inputs if n not in members}
        return {n: made for n in sorted(inputs) if (made := self._reader.made(n)) is not None}

    def _reads(self, made: Made) -> Iterator[tuple[int, int]]:
        """What a tensor is made from, with the tasks that read it."""
        for task in made.tasks:
            for number in self._step.tasks[task].reads:
                if number in made.inputs:
                    yield number, task

    def _is_there(self, number: int, until: int) -> bool:
        return self._reader.is_state(number) or self._step.tensors[number].death >= until

    def _is_right(self, number: int, task: int, members: dict[int, Made], until: int) -> bool:
        """Whether an input will be what it was."""
        if number in members:
            return self._reader.is_settled(members[number], task)
        return self._reader.is_unchanged(number, task, until)

    def _call_of(self, members: tuple[Made, ...]) -> Call | None:
        """The innermost call in which the members are made and saved; None where there is none."""
        every = [task for made in members for task in (*made.tasks, *made.savers)]
        first, last = min(every), max(every)
        call = self._innermost.get(first)
        while call is not None and not self._holds(call, last):
            call = self._outer.get(call)
        return call

    def _holds(self, call: Call, last: int) -> bool:
        return last < call.span.last and not self._step.modules[call.module].hooked

    def _place(self, group: GroupCall) -> Place:
        runs = (self._run(task, group.call.span.first) for task in group.tasks)
        return Place(self._step.modules[group.call.module].path, tuple(runs))

    def _run(self, task: int, first: int) -> Run:
        """The task's role, and its ordinal among tasks of that role since `first`."""
        name = self._reader.roles[task]
        among = self._places[name]
        return Run(name, bisect_left(among, task) - bisect_left(among, first))


def _in_order(members: dict[int, Made]) -> tuple[Made, ...]:
    return tuple(sorted(members.values(), key=lambda made: made.tasks[0]))


def _last(members: Iterable[Made]) -> int:
    """When backward has left the last that asks for one of these."""
    return max(made.until for made in members)
