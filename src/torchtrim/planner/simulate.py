"""The memory of a step if some of its forward ran again in backward: computed, not run.

For every storage it is known which operators read it, and for every backward operator which forward
operator it belongs to. So it is known who still needs a storage when a span of operators gives up what
it saved: other operators keep the first copy as long as they need it; the span's own needs are served
by a second copy, made when its backward begins; and its inputs live until its backward ends.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from itertools import accumulate
from operator import add
from typing import NamedTuple

from torchtrim.records.profile import Operator, Profile
from torchtrim.techniques.base import Option, Span

_STATE = ("parameter", "buffer", "optimizer_state", "gradient")
_OPERATOR_SECONDS = 1e-5
_SPAN_SECONDS = 2e-4


class Outcome(NamedTuple):
    """A simulated step: highest bytes, the operator that sets it, and the time that is added."""

    peak_bytes: int
    peak_operator: int
    added_seconds: float


class _Rerun(NamedTuple):
    """What running a span again costs, whatever else runs again."""

    span: Span
    begins: int
    ends: int
    bump: int
    seconds: float
    copies: tuple[tuple[int, int], ...]
    copied_bytes: int
    lost: tuple[tuple[int, int], ...]
    inputs: tuple[int, ...]


class Simulator:
    """Simulates one profile for many choices; what does not depend on the choice is computed once."""

    def __init__(self, profile: Profile) -> None:
        self._profile = profile
        count = len(profile.operators)
        self._readers: defaultdict[int, list[int]] = defaultdict(list)
        for index, op in enumerate(profile.operators):
            for number in {use.storage for use in op.inputs}:
                self._readers[number].append(index)
        self._born: defaultdict[int, list[int]] = defaultdict(list)
        self._delta = [0] * (count + 2)
        for number, storage in enumerate(profile.storages):
            self._born[storage.birth].append(number)
            self._delta[storage.birth + 1] += storage.bytes
            self._delta[storage.death] -= storage.bytes
        self._transients = [op.transient_bytes for op in profile.operators]
        self._backward: defaultdict[int, list[int]] = defaultdict(list)
        for index, op in enumerate(profile.operators):
            if op.forward >= 0:
                self._backward[op.forward].append(index)
        self._reruns: dict[Span, _Rerun | None] = {}

    def run(self, options: Iterable[Option]) -> Outcome:
        """The step with these options, whose spans must not overlap."""
        reruns = self._reruns_of(options)
        before = self._before(reruns)
        high = list(map(add, before, self._transients))
        peak = max(high, default=before[0])
        where = high.index(peak) if high else 0
        for rerun in reruns:
            level = before[rerun.begins] - rerun.copied_bytes + rerun.bump
            if level > peak:
                peak, where = level, rerun.begins
        return Outcome(peak, where, sum(rerun.seconds for rerun in reruns))

    def begins(self, option: Option) -> int:
        """The operator at which the option's last span begins to run again; -1 for one that does not."""
        rerun = self._rerun(option.spans[-1])
        return rerun.begins if rerun is not None else -1

    def tail(self, options: Iterable[Option], since: int) -> tuple[int, int]:
        """`(peak from an operator on, bytes alive there before anything begins to run again)`."""
        reruns = self._reruns_of(options)
        before = self._before(reruns)
        peak = max(map(add, before[since:], self._transients[since:]))
        levels = [before[r.begins] - r.copied_bytes + r.bump for r in reruns if r.begins >= since]
        fresh = sum(r.copied_bytes for r in reruns if r.begins == since)
        return max((peak, *levels)), before[since] - fresh

    def _reruns_of(self, options: Iterable[Option]) -> list[_Rerun]:
        spans = (span for option in options for span in option.spans)
        return [rerun for span in spans if (rerun := self._rerun(span)) is not None]

    def _before(self, reruns: Sequence[_Rerun]) -> list[int]:
        """Bytes alive going into each operator."""
        delta = self._delta.copy()
        for number, death in self._deaths(reruns).items():
            storage = self._profile.storages[number]
            delta[storage.death] += storage.bytes
            delta[death] -= storage.bytes
        for rerun in reruns:
            for number, death in rerun.copies:
                size = self._profile.storages[number].bytes
                delta[rerun.begins] += size
                delta[death] -= size
        return list(accumulate(delta))

    def seconds(self, option: Option) -> float:
        """The time that an option adds; 0 for one that has no backward and saves nothing."""
        return sum(rerun.seconds for s in option.spans if (rerun := self._rerun(s)) is not None)

    def freed(self, option: Option, operator: int) -> int:
        """Bytes that an option alone frees while an operator runs, to first order."""
        storages = self._profile.storages
        freed = 0
        for span in option.spans:
            rerun = self._rerun(span)
            if rerun is None or not span.last <= operator:
                continue
            freed += sum(
                storages[number].bytes
                for number, death in rerun.lost
                if death <= operator < storages[number].death
            )
            if operator >= rerun.begins:
                freed -= sum(
                    storages[number].bytes for number, death in rerun.copies if operator < death
                )
        return freed

    def reruns_at(self, option: Option, operator: int) -> bool:
        """Whether the option runs again, or holds what it made, while an operator runs."""
        reruns = (self._rerun(span) for span in option.spans)
        return any(rerun.begins <= operator <= rerun.ends for rerun in reruns if rerun is not None)

    def _deaths(self, reruns: Sequence[_Rerun]) -> dict[int, int]:
        """New ends of the first copies: of what a rerun gives up, and of what it needs as input."""
        deaths: dict[int, int] = {}
        for rerun in reruns:
            deaths.update(rerun.lost)
        for rerun in reruns:
            for number in rerun.inputs:
                death = deaths.get(number, self._profile.storages[number].death)
                if death <= rerun.ends:
                    deaths[number] = rerun.ends + 1
        return deaths

    def _rerun(self, span: Span) -> _Rerun | None:
        if span not in self._reruns:
            self._reruns[span] = self._make_rerun(span)
        return self._reruns[span]

    def _make_rerun(self, span: Span) -> _Rerun | None:
        backward = [i for f in range(span.first, span.last) for i in self._backward[f]]
        if not backward:
            return None
        operators = self._profile.operators
        begins, ends = min(backward), max(backward)
        born = [n for i in range(span.first, span.last) for n in self._born[i]]
        copies, lost = [], []
        for number in born:
            if self._profile.storages[number].kind != "activation":
                continue
            second, first = self._split(number, span)
            lost.append((number, first))
            if second:
                copies.append((number, second))
        last = self._last_saver(span)
        ran = range(span.first, last)
        seconds = sum(operators[i].seconds + _OPERATOR_SECONDS for i in ran) + _SPAN_SECONDS
        inputs = self._inputs(span)
        bump = self._bump(span, last, dict(copies))
        copied = sum(self._profile.storages[number].bytes for number, _ in copies)
        return _Rerun(span, begins, ends, bump, seconds, tuple(copies), copied, tuple(lost), inputs)

    def _split(self, number: int, span: Span) -> tuple[int, int]:
        """`(end of the second copy or 0, end of the first)` of an activation born in the span.

        Who lets go of a storage last is told by the operator after which it died.
        """
        operators = self._profile.operators
        storage = self._profile.storages[number]
        first, second = storage.birth + 1, 0
        for holder in (*self._readers[number], storage.death - 1):
            op = operators[holder]
            if op.phase in ("backward", "recompute") and span.first <= op.forward < span.last:
                second = max(second, holder + 1)
            else:
                first = max(first, holder + 1)
        return second, first

    def _last_saver(self, span: Span) -> int:
        """The operator after the last one of the span that has a backward."""
        return max(f + 1 for f in range(span.first, span.last) if self._backward[f])

    def _inputs(self, span: Span) -> tuple[int, ...]:
        storages = self._profile.storages
        read = {
            use.storage
            for op in self._profile.operators[span.first : span.last]
            for use in op.inputs
        }
        return tuple(
            number
            for number in sorted(read)
            if storages[number].birth < span.first and storages[number].kind not in _STATE
        )

    def _bump(self, span: Span, last: int, copies: dict[int, int]) -> int:
        """The highest that memory rises while the span runs again."""
        level = highest = 0
        ends: defaultdict[int, int] = defaultdict(int)
        for index in range(span.first, last):
            level -= ends[index]
            op: Operator = self._profile.operators[index]
            highest = max(highest, level + op.transient_bytes)
            for number in self._born[index]:
                storage = self._profile.storages[number]
                level += storage.bytes
                if number not in copies:
                    readers = (r for r in self._readers[number] if span.first <= r < last)
                    ends[max(readers, default=index) + 1] += storage.bytes
        return max(highest, level)
