"""Finds tensors of a step that can be on the host for a while, with the time window and the edit of each."""

from __future__ import annotations

import itertools
from bisect import bisect_left
from collections.abc import Iterator
from functools import cached_property
from typing import NamedTuple

import msgspec

from torchtrim.analysis.prices import device_of
from torchtrim.executor.roles import UNNAMED, OperatorOrdinal
from torchtrim.records.plan import Technique
from torchtrim.records.profile import STATE, Profile
from torchtrim.records.remembered import remembered
from torchtrim.step.edits import (
    DISK,
    FILE,
    PINNED,
    Block,
    Drop,
    Edit,
    Insert,
    Need,
    Trip,
    host_blocks,
    joined,
    packed,
)
from torchtrim.step.index import index_of
from torchtrim.step.simulate import simulate
from torchtrim.step.step import DEVICE, Span, Step, StepCall
from torchtrim.techniques.offload_activations.places import (
    END,
    OffloadPlace,
    Room,
    placed,
    written,
)
from torchtrim.techniques.replay.reading import RemakeReader

_KEPT = STATE | {"input"}
_LEAST_SHARE = 0.002  # Tensors below 0.2 % of the peak are not worth two copies.
_LARGE_SHARE = 0.02  # Arbitrary: smaller tensors, which are more, have no second option to price.
_LEAST_BYTES = 16_384  # Arbitrary: below this the latency of a copy dominates its transfer.
_SECONDS_A_COPY = 2e-5  # To queue a copy with its events: two kernel launches on most devices.


class OffloadCandidate(NamedTuple):
    """A tensor in one call: when it is first saved, when backward first reads it, and when it is released."""

    tensor: int
    holds: tuple[int, ...]
    packed: int
    asked: int
    until: int


@remembered
def windows_of(step: Step) -> dict[OffloadPlace, tuple[Span, ...]]:
    """Return the possible offloads with their calls, in order of backward's reads."""
    profile = step.profile
    if profile is None or not profile.saved_known:
        return {}
    planner = reading_of(step)
    roots = dict.fromkeys(module.path for module in step.modules if module.parent < 0)
    first_calls = [call for root in roots for call in planner.calls(root)[:1]]
    places = [place for call in first_calls for place in planner.places(call)]
    return {place: planner.spans(place) for place in places}


def edit_of(step: Step, place: OffloadPlace, *, in_file: bool = False) -> Edit | None:
    """Return the edit of a place in all calls of its root. None if one call lacks it or gains nothing."""
    if step.profile is None:
        return None
    planner = reading_of(step)
    edits = [planner.edit(call, place, in_file) for call in planner.calls(place.root)]
    known = [edit for edit in edits if edit is not None]
    return joined(known) if known and len(known) == len(edits) else None


@remembered
def reading_of(step: Step) -> _Reading:
    """Return the cached analysis of a step."""
    assert step.profile is not None
    return _Reading(step, step.profile)


class _Reading:
    def __init__(self, step: Step, profile: Profile) -> None:
        self._step = step
        self._profile = profile
        self._reader = RemakeReader(step, profile)
        self._link = device_of(profile).link
        peak = simulate(step).peak_bytes
        self._least, self._large = max(peak * _LEAST_SHARE, _LEAST_BYTES), peak * _LARGE_SHARE
        self._clock = step.clock
        self._writers = index_of(step).writers

    def calls(self, root: str) -> list[StepCall]:
        modules = self._step.modules
        numbers = {n for n, one in enumerate(modules) if one.parent < 0 and one.path == root}
        return [call for call in self._step.calls if call.graded and call.module in numbers]

    def spans(self, place: OffloadPlace) -> tuple[Span, ...]:
        tasks = (self._task(call, place.made) for call in self.calls(place.root))
        return tuple(Span(task, task + 1) for task in tasks if task is not None)

    def places(self, call: StepCall) -> list[OffloadPlace]:
        numbers = range(len(self._step.tensors))
        candidates = [one for n in numbers if (one := self._candidate(call, n)) is not None]
        until = self._outwards(call, sorted(candidates, key=lambda one: (one.packed, one.tensor)))
        triggers, asked = self._homewards(call, candidates), self._all_asked.get(call.span, {})
        found = [
            self._place(call, one, at, trigger)
            for one in sorted(candidates, key=lambda one: (one.asked, one.packed, one.tensor))
            for at, trigger in (
                (until[one.tensor], triggers[one.tensor]),
                *self._waiting(call, one, asked),
            )
            if trigger is not None and at < asked[trigger]
        ]
        return list(dict.fromkeys(found))

    def _waiting(
        self, call: StepCall, one: OffloadCandidate, asked: dict[int, int]
    ) -> Iterator[tuple[int, int]]:
        """Yield the window of a large tensor if compute awaits both copies, with its trigger.

        Not of further results: only the first claims its task, so that one option excludes the other.
        """
        tensor = self._step.tensors[one.tensor]
        if tensor.bytes >= self._large and self._step.tasks[tensor.birth].makes[0] == one.tensor:
            reads = (task for task, read in asked.items() if read == one.asked)
            yield from ((self._freed(call, one, 0), task) for task in itertools.islice(reads, 1))

    def edit(self, call: StepCall, place: OffloadPlace, in_file: bool) -> Edit | None:
        tensor = self._made(call, place)
        one = self._candidate(call, tensor) if tensor is not None else None
        until = call.span.last if place.until == END else self._task(call, place.until)
        trigger = self._task(call, place.trigger)
        if one is None or until is None or trigger is None:
            return None
        back = min(self._all_asked.get(call.span, {}).get(trigger, one.asked), one.asked)
        if not one.packed < until < back:
            return None
        claims = () if place.result else (self._step.tensors[one.tensor].birth,)
        edit = (self._in_file if in_file else self._edit)(one, until, back)
        return edit._replace(claims=tuple(Span(i, i + 1) for i in claims))

    def _edit(self, one: OffloadCandidate, until: int, back: int) -> Edit:
        size = self._step.tensors[one.tensor].bytes
        return Edit(
            drops=tuple(Drop(one.tensor, hold) for hold in one.holds),
            needs=(Need(one.tensor, until),),
            blocks=(
                Block(size, back, one.until),
                Block(size, one.packed + 1, one.until, PINNED),
            ),
            inserts=(Insert(back, 0.0, size, size),),
            trips=(self._trip(one, until, back),),
        )

    def _in_file(self, one: OffloadCandidate, until: int, back: int) -> Edit:
        """Return the edit for a file: compute pauses for both copies, since file pages are not pinned."""
        edit, size = self._edit(one, until, back), self._step.tensors[one.tensor].bytes
        seconds = size / min(self._link, DISK)
        device, host = edit.blocks
        return edit._replace(
            blocks=(device, host._replace(pool=FILE)),
            inserts=(Insert(one.packed + 1, seconds, 0), Insert(back, seconds, size, size)),
            trips=(),
        )

    def _trip(self, one: OffloadCandidate, until: int, back: int) -> Trip:
        size, leaves = self._step.tensors[one.tensor].bytes, one.packed + 1
        seconds = size / self._link
        out = max(seconds - (self._clock[until] - self._clock[leaves]), 0.0)
        home = max(seconds - (self._clock[one.asked] - self._clock[back]), 0.0)
        return Trip(size, seconds, leaves, until, back, one.asked, _SECONDS_A_COPY, out + home)

    def _candidate(self, call: StepCall, number: int) -> OffloadCandidate | None:
        """Return a tensor of a call if it is worth offloading."""
        tensor = self._step.tensors[number]
        if tensor.bytes < self._least or tensor.pool != DEVICE or tensor.kind in _KEPT:
            return None
        inside, roles = range(*call.span), self._reader.roles
        if tensor.birth not in inside or roles[tensor.birth] == UNNAMED:
            return None
        holds = {place: hold for place, hold in enumerate(tensor.holds) if hold.saver >= 0}
        asked = [hold.asked for hold in holds.values() if hold.asked >= 0]
        if not asked or any(hold.hooked or hold.saver not in inside for hold in holds.values()):
            return None
        packed = min(hold.packed for hold in holds.values())
        if max(self._writers.get(number, ()), default=-1) > packed:
            return None
        until = max(hold.until for hold in holds.values())
        return OffloadCandidate(number, tuple(holds), max(packed, tensor.birth), min(asked), until)

    def _outwards(self, call: StepCall, candidates: list[OffloadCandidate]) -> dict[int, int]:
        """Return when to free each, after the link has copied it and all before it."""
        free, until = 0.0, {}
        for one in candidates:
            seconds = self._step.tensors[one.tensor].bytes / self._link
            free = max(free, self._clock[one.packed + 1]) + seconds
            until[one.tensor] = self._freed(call, one, bisect_left(self._clock, free))
        return until

    def _freed(self, call: StepCall, one: OffloadCandidate, copied: int) -> int:
        """Return the first task after its copy and its last use that a plan can name, or the call's end."""
        holds, last = self._step.tensors[one.tensor].holds, call.span.last
        used = max((hold.until for hold in holds if hold.saver < 0), default=0)
        done = max(copied, one.packed + 2, min(used, last))
        return next((i for i in range(done, last) if self._reader.roles[i] != UNNAMED), last)

    def _homewards(
        self, call: StepCall, candidates: list[OffloadCandidate]
    ) -> dict[int, int | None]:
        """Return the task whose saved tensors trigger each fetch: the last that leaves time for its copy and
        for the copies of later reads.
        """
        asked = self._all_asked.get(call.span, {})
        by_time = sorted(asked, key=asked.__getitem__)
        moments = [self._clock[asked[task]] for task in by_time]
        due, back = float("inf"), {}
        for one in sorted(candidates, key=lambda one: (-one.asked, one.packed, one.tensor)):
            seconds = self._step.tensors[one.tensor].bytes / self._link
            due = min(due, self._clock[one.asked]) - seconds
            place = bisect_left(moments, due)
            if place == len(moments) or moments[place] > due:
                place -= 1
            back[one.tensor] = by_time[max(place, 0)] if by_time else None
        return back

    @cached_property
    def _all_asked(self) -> dict[Span, dict[int, int]]:
        """By call, for tasks that autograd saved tensors for: when backward first reads these."""
        asked: dict[Span, dict[int, int]] = {}
        spans = [c.span for c in self._step.calls if self._step.modules[c.module].parent < 0]
        roles = self._reader.roles
        for saved in self._profile.saved:
            for span in spans if saved.saver >= 0 else ():
                packed = saved.packed
                while packed >= span.first and roles[packed] == UNNAMED:
                    packed -= 1
                if span.first <= packed and saved.saver < span.last and saved.unpacked >= 0:
                    moments = asked.setdefault(span, {})
                    moments[packed] = min(moments.get(packed, saved.unpacked), saved.unpacked)
        return asked

    def _place(
        self, call: StepCall, one: OffloadCandidate, until: int, trigger: int
    ) -> OffloadPlace:
        task, root = self._step.tensors[one.tensor].birth, self._step.modules[call.module].path
        results = self._step.tasks[task].makes
        result = results.index(one.tensor) if one.tensor in results else 0
        created, fetched = (self._reader.ordinal(i, call.span.first) for i in (task, trigger))
        is_last = until >= call.span.last
        freed = END if is_last else self._reader.ordinal(until, call.span.first)
        return OffloadPlace(root, created, result, freed, fetched)

    def _made(self, call: StepCall, place: OffloadPlace) -> int | None:
        task = self._task(call, place.made)
        made = self._step.tasks[task].makes if task is not None else ()
        number = made[place.result] if place.result < len(made) else None
        return number if number is not None and self._step.tensors[number].birth == task else None

    def _task(self, call: StepCall, run: OperatorOrdinal) -> int | None:
        among = self._reader.forward_tasks.get(run.name, [])
        number = bisect_left(among, call.span.first) + run.ordinal
        return next((task for task in among[number : number + 1] if task < call.span.last), None)


SLAB_BYTES, FILE_BYTES = "slab_bytes", "file_bytes"


def laid_out(step: Step, technique: Technique) -> Technique:
    """Add the slab sizes to the technique, and to each place its offsets, one per call."""
    where = [placed(one) for one in technique.where]
    rooms: dict[OffloadPlace, Room] = {}
    options = dict(technique.options)
    for in_file, name in ((False, SLAB_BYTES), (True, FILE_BYTES)):
        blocks, owners = [], []
        offsets: dict[OffloadPlace, dict[int, None]] = {}
        for place in (place for place, room in where if room.in_file == in_file):
            offsets[place] = {}
            edit = edit_of(step, place, in_file=in_file)
            for block in host_blocks(edit) if edit is not None else ():
                blocks.append(block)
                owners.append(place)
        packing = packed(blocks)
        for number, place in enumerate(owners):
            offsets[place][packing.offsets[number]] = None
        rooms |= {place: Room(tuple(several), in_file) for place, several in offsets.items()}
        if packing.height:
            options[name] = packing.height
    texts = tuple(written(place, rooms[place]) for place, _ in where)
    return msgspec.structs.replace(technique, where=texts, options=options)
