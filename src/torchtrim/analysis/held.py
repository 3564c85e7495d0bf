"""Finds memory that the step does not need, and what freeing it would save."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

from msgspec.structs import replace

from torchtrim.analysis.timeline import timeline
from torchtrim.analysis.user_source import SourceLine
from torchtrim.records.finding import Equivalence, Finding, Suggestion
from torchtrim.records.profile import Call, Profile
from torchtrim.records.remembered import remembered

_SHARE = 0.02  # Arbitrary; freeing less is not worth a change of code.


def is_much(profile: Profile, size: int) -> bool:
    """Return True if bytes are worth a finding: 2 % of the peak."""
    return size >= _SHARE * profile.tracked_peak_bytes and size > 0


def finding_at(
    code: str,
    line: SourceLine,
    price: int,
    message: str,
    advice: str,
    *,
    count: int = 1,
    equivalence: Equivalence = "BITWISE",
) -> Finding:
    """Build a finding priced in bytes, by how much it would lower the peak."""
    return Finding(
        code=code,
        path=line.path,
        line=line.line,
        end_line=line.line,
        message=message,
        count_per_step=count,
        price_bytes=price,
        source="modelled",
        fix=Suggestion(kind="advice", equivalence=equivalence, reason=advice),
    )


_BACKWARD = ("backward", "recompute")
_RESULTS = ("activation", "temporary", "input")
_HALF = 0.5  # A graph is retained for all that was saved, or for nothing; half tells the two apart.
_FEW = 4  # Arbitrary; fewer kept tensors may each have a reason of their own.


def freed(profile: Profile, deaths: Mapping[int, int]) -> int:
    """Return by how many bytes the peak would fall if these storages died at these operators."""
    storages = list(profile.storages)
    for number, death in deaths.items():
        one = storages[number]
        storages[number] = replace(one, death=min(max(death, one.birth, 0), one.death))
    before = max(timeline(profile).high, default=0)
    return before - max(timeline(replace(profile, storages=storages)).high, default=0)


def stale_gradients(profile: Profile) -> list[int]:
    """Return gradients of the previous step that this one drops without having read or written them."""
    last = _last_use(profile)
    return [
        number
        for number, one in enumerate(profile.storages)
        if one.kind == "gradient"
        and one.birth < 0 < one.death < len(profile.operators)
        and not last[number]
    ]


def named(profile: Profile) -> dict[int, dict[int, int]]:
    """Return tensors that a variable holds past their last use, by the operator that created them.

    Each has the earliest operator after which it could have died, as does the tensor that the variable
    still held from the previous step.
    """
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
    """Return what autograd keeps after backward used it, with the operator at which it could have died.

    Empty unless most saved tensors are kept, as with a retained graph, and no second backward uses them.
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
    """Return what root calls with gradients created but no backward used, with the operator at which it
    could have died. What they return belongs to the caller."""
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
    """Return storages written from parameters after the optimizer's step, such as their moving average."""
    trained = {update.parameter for step in profile.optimizer_steps for update in step.updates}
    found = {
        number
        for op in profile.operators
        if op.phase == "other" and any(use.storage in trained for use in op.inputs)
        for number in op.mutates
    }
    return sorted(n for n in found - trained if _is_copy(profile, n))


def references(profile: Profile) -> list[int]:
    """Return the frozen parameters of a root model about as large as the trained one, or larger."""
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
    """Return for each storage the operator after the last one that needs it, or 0."""
    last = [max(one.birth + 1, 0) for one in profile.storages]
    for index, op in enumerate(profile.operators):
        for n in (*(use.storage for use in (*op.inputs, *op.outputs)), *op.mutates):
            last[n] = index + 1
    for one in profile.saved:
        last[one.storage] = max(last[one.storage], one.unpacked + 1)
    return tuple(last)
