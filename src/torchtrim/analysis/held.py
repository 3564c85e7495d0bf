"""What is kept in memory though nothing of the step needs it, and what letting go of it would free."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

from msgspec.structs import replace

from torchtrim.analysis.timeline import timeline
from torchtrim.records.profile import Call, Profile
from torchtrim.records.remembered import remembered

_BACKWARD = ("backward", "recompute")
_RESULTS = ("activation", "temporary", "input")
_HALF = 0.5  # A graph is retained for all that was saved, or for nothing; half tells the two apart.
_FEW = 4  # Arbitrary; fewer kept tensors may each have a reason of their own.


def freed(profile: Profile, deaths: Mapping[int, int]) -> int:
    """By how many bytes the peak would be lower if these storages died at these operators."""
    storages = list(profile.storages)
    for number, death in deaths.items():
        one = storages[number]
        storages[number] = replace(one, death=min(max(death, one.birth, 0), one.death))
    before = max(timeline(profile).high, default=0)
    return before - max(timeline(replace(profile, storages=storages)).high, default=0)


def stale_gradients(profile: Profile) -> list[int]:
    """Gradients of the step before that are dropped in this one, and that nothing looks at until then."""
    last = _last_use(profile)
    return [
        number
        for number, one in enumerate(profile.storages)
        if one.kind == "gradient"
        and one.birth < 0 < one.death < len(profile.operators)
        and not last[number]
    ]


def named(profile: Profile) -> dict[int, dict[int, int]]:
    """What a name holds when the step is over, and what it held of the step before, by the operator that made
    it: each with the operator at which it could have died."""
    count, last = len(profile.operators), _last_use(profile)
    olds: dict[int, list[int]] = defaultdict(list)
    for number, one in enumerate(profile.storages):
        if one.kind == "input" and one.birth < 0 < one.death < count and not last[number]:
            olds[one.bytes].append(number)
    found: dict[int, dict[int, int]] = {}
    for number, one in enumerate(profile.storages):
        if one.birth >= 0 and one.death == count and one.kind in _RESULTS:
            deaths = found.setdefault(one.birth, {})
            deaths[number] = last[number]
            if olds[one.bytes]:
                deaths[olds[one.bytes].pop(0)] = 0
    return found


def retained(profile: Profile) -> dict[int, int]:
    """What autograd keeps after backward has used it, with the operator at which it could have died.

    Empty unless most saved tensors are kept, as where backward retains the graph, and where a second
    backward asks for it.
    """
    over = (
        max((i for i, op in enumerate(profile.operators) if op.phase in _BACKWARD), default=-1) + 1
    )
    last = _last_use(profile)
    used = {
        one.storage
        for one in profile.saved
        if one.unpacked >= 0 and profile.storages[one.storage].kind == "activation"
    }
    kept = {n: last[n] for n in used if profile.storages[n].death > over}
    again = any(one.asked > 1 and one.storage in kept for one in profile.saved)
    if again or len(kept) < max(_FEW, _HALF * len(used)):
        return {}
    return kept


def unused_graphs(profile: Profile) -> dict[Call, dict[int, int]]:
    """Calls of roots with gradients of which no backward comes by: what they made, with the operator at which
    it could have died. What they return is its caller's."""
    reached = {op.forward for op in profile.operators if op.phase in _BACKWARD}
    savers = {one.saver for one in profile.saved if one.unpacked >= 0}
    found = {}
    for call in profile.calls:
        span = range(call.first, call.last)
        if call.depth == 0 and call.graded and span and (reached | savers).isdisjoint(span):
            made = {n for n, one in enumerate(profile.storages) if one.birth in span}
            last = _last_use(profile)
            found[call] = {n: last[n] for n in made - {*call.outputs}}
    return found


def averages(profile: Profile) -> list[int]:
    """Storages that are written from parameters after the optimizer's step, such as an average of them."""
    trained = {update.parameter for step in profile.optimizer_steps for update in step.updates}
    found = {
        number
        for op in profile.operators
        if op.phase == "other" and any(use.storage in trained for use in op.inputs)
        for number in op.mutates
    }
    return sorted(n for n in found - trained if _is_copy(profile, n))


def references(profile: Profile) -> list[int]:
    """Parameters that are not trained, of a root with as many bytes as those that are, or nearly."""
    trained = {update.parameter for step in profile.optimizer_steps for update in step.updates}
    size = sum(profile.storages[n].bytes for n in trained)
    roots = {profile.modules[c.module].path for c in profile.calls if c.depth == 0 and not c.graded}
    frozen = [
        n
        for n, one in enumerate(profile.storages)
        if one.kind == "parameter" and n not in trained and one.name.partition(".")[0] in roots
    ]
    close = abs(sum(profile.storages[n].bytes for n in frozen) - size) <= size / 20
    return frozen if size and close else []


def _is_copy(profile: Profile, number: int) -> bool:
    one = profile.storages[number]
    return one.birth < 0 and one.kind not in ("optimizer_state", "gradient")


@remembered
def _last_use(profile: Profile) -> tuple[int, ...]:
    """For each storage the operator that comes after the last which needs it; 0 for none of the step."""
    last = [max(one.birth + 1, 0) for one in profile.storages]
    for index, op in enumerate(profile.operators):
        for n in (*(use.storage for use in (*op.inputs, *op.outputs)), *op.mutates):
            last[n] = index + 1
    for one in profile.saved:
        last[one.storage] = max(last[one.storage], one.unpacked + 1)
    return tuple(last)
