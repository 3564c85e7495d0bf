"""Candidates for replay: groups of tensors that are dropped and recomputed together."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import NamedTuple

from torchtrim.records.remembered import remembered
from torchtrim.step.index import index_of
from torchtrim.step.simulate import simulate
from torchtrim.step.step import Span, Step, StepCall
from torchtrim.techniques.replay.places import ReplayPlace
from torchtrim.techniques.replay.reading import Remake, RemakeReader

_LEAST_SHARE = 0.001  # Smaller tensors are not worth a recipe: a hundred are a tenth of the peak.
_LEAST_BYTES = 16_384  # Smaller tensors are not much larger than a recipe, a few Python objects.
_MOST_MEMBERS = 8  # Arbitrary: larger groups approach recompute of the whole module.
_DEEPEST = 3  # Arbitrary: deeper chains cost more reruns for each saved byte.
_MOST_UNREAD = 64  # Arbitrary: a bound for the places of a plan; nothing of them reruns.


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
    """The same operators in all calls of a module. `unread`: no backward of the step reads their results."""

    calls: tuple[GroupCall, ...]
    unread: bool = False

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
        self._nest()

    def _nest(self) -> None:
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
        groups: defaultdict[ReplayPlace, list[GroupCall]] = defaultdict(list)
        sets: dict[frozenset[int], tuple[tuple[Remake, ...], StepCall]] = {}
        wanted: defaultdict[StepCall, set[int]] = defaultdict(set)
        for target, members in self._sets():
            call = self._call_of(members)
            if call is not None:
                sets[frozenset(made.tensor for made in members)] = members, call
                wanted[call].add(target)
        unread = self._unread_sets()
        for members, call in (*sets.values(), *unread):
            group = GroupCall(members, call, max(len(wanted[call]), 1))
            first = call.span.first
            runs = tuple(self._reader.ordinal(task, first) for task in group.tasks)
            groups[ReplayPlace(self._step.modules[call.module].path, runs)].append(group)
        calls = index_of(self._step).calls
        return {
            str(place): Group(
                tuple(several), unread=(several[0].members, several[0].call) in unread
            )
            for place, several in groups.items()
            if len(several) == sum(call.graded for call in calls[several[0].call.module])
        }

    def _unread_sets(self) -> list[tuple[tuple[Remake, ...], StepCall]]:
        """Return, for each call, the tensors of it that a graph saves which is dropped without a backward."""
        found: defaultdict[StepCall, dict[int, Remake]] = defaultdict(dict)
        for number, tensor in enumerate(self._step.tensors):
            shorter = tensor.bytes >= self._least and self._unsaved_end(number) < tensor.death
            if not shorter or (made := self._unread(number)) is None:
                continue
            members = self._with_freed_inputs(made)
            call = self._call_of(_in_order(members))
            if call is not None and len(found[call] | members) <= _MOST_UNREAD:
                found[call] |= members
        return [(_in_order(members), call) for call, members in found.items() if members]

    def _unread(self, number: int) -> Remake | None:
        """Return how a tensor is computed if no backward of the step reads it."""
        made = self._reader.made(number)
        if made is None or made.elements or made.asked >= 0:
            return None
        return made if made.dropped < len(self._step.tasks) else None

    def _unsaved_end(self, number: int) -> int:
        """Return the end of a tensor's life if no graph saved it."""
        tensor = self._step.tensors[number]
        saves = (place for place, hold in enumerate(tensor.holds) if hold.saver >= 0)
        return tensor.end({*saves}, ())

    def _with_freed_inputs(self, target: Remake) -> dict[int, Remake]:
        """Return a tensor with the large ones that it is computed from and that only its graph would keep."""
        members, waiting = {target.tensor: target}, [target]
        while waiting:
            for number, task in self._reads(waiting.pop()):
                is_small = self._step.tensors[number].bytes < self._least
                kept = self._reader.is_state(number) or self._unsaved_end(number) >= target.dropped
                if number in members or kept or is_small:
                    continue
                if self._reader.made_for(number, task) and (made := self._unread(number)):
                    members[number] = made
                    waiting.append(made)
        return members

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
                # One input alone, such as noise, can be cheaper than all.
                for one, made in more.items() if len(more) > 1 else ():
                    several = {**members, one: made}
                    if self._add_missing(several):
                        yield number, _in_order(several)
                members = {**members, **more}

    def _worth(self, number: int) -> Remake | None:
        if self._step.tensors[number].bytes < self._least:
            return None
        made = self._reader.made(number)
        return made if made is not None and made.asked >= 0 else None

    def _add_missing(self, members: dict[int, Remake]) -> bool:
        waiting = list(members.values())
        until = max(
            made.until for made in waiting
        )  # The last backward task that needs one of these.
        while waiting:
            made = waiting.pop()
            for number, task in self._reads(made):
                kept = self._reader.is_state(number) or self._step.tensors[number].death >= until
                is_freed = number not in members and not kept
                if is_freed and (more := self._reader.made_for(number, task)) is not None:
                    members[number] = more
                    waiting.append(more)
                # An input must have its original value at the rerun.
                if number in members:
                    if members[number].tasks[-1] >= task:
                        return False
                elif not self._reader.is_unchanged(number, task, until):
                    return False
        return len(members) <= _MOST_MEMBERS

    def _remakeable_inputs(self, members: dict[int, Remake]) -> dict[int, Remake]:
        reads = {one for made in members.values() for one in self._reads(made)}
        return {
            number: made
            for number, task in sorted(reads)
            if number not in members and (made := self._reader.made_for(number, task)) is not None
        }

    def _reads(self, made: Remake) -> Iterator[tuple[int, int]]:
        for task in made.tasks:
            for number in self._step.tasks[task].reads:
                if number in made.inputs:
                    yield number, task

    def _call_of(self, members: tuple[Remake, ...]) -> StepCall | None:
        # A backward that is differentiated again saves what it unpacked, outside of the call.
        savers = (saver for made in members for saver in made.savers)
        own = [saver for saver in savers if self._step.tasks[saver].phase != "backward"]
        every = [*own, *(task for made in members for task in made.tasks)]
        first, last = min(every), max(every)
        call, modules = self._innermost.get(first), self._step.modules
        while call is not None and (last >= call.span.last or modules[call.module].hooked):
            call = self._outer.get(call)
        return call


def _in_order(members: dict[int, Remake]) -> tuple[Remake, ...]:
    return tuple(sorted(members.values(), key=lambda made: made.tasks[0]))
