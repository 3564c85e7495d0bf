"""Finds memory that the step does not need, and what freeing it would save."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

from msgspec.structs import replace

from torchtrim.analysis.timeline import timeline
from torchtrim.analysis.user_source import CodeLine
from torchtrim.records.finding import Equivalence, Finding
from torchtrim.records.profile import Call, Kind, Place, Profile
from torchtrim.records.remembered import remembered

_SHARE = 0.02  # Arbitrary; freeing less is not worth a change of code.


def is_much(profile: Profile, size: int) -> bool:
    """Return True if bytes are worth a finding: 2 % of the peak."""
    return size >= _SHARE * profile.tracked_peak_bytes and size > 0


def finding_at(
    code: str,
    line: CodeLine,
    price: int,
    message: str,
    advice: str,
    *,
    count: int = 1,
    equivalence: Equivalence = "BITWISE",
) -> Finding:
    """Build a finding priced in bytes, by how much it would lower the peak."""
    return line.finding(
        code,
        message,
        advice,
        equivalence=equivalence,
        count_per_step=count,
        price_bytes=price,
        source="modelled",
    )


_BACKWARD = ("backward", "recompute")
_RESULTS = ("activation", "temporary", "input")
_HALF = 0.5  # A graph keeps all its saved tensors or none: half tells the two apart.
_FEW = 4  # Arbitrary; fewer kept tensors may each have a reason of their own.


def freed(profile: Profile, deaths: Mapping[int, int]) -> int:
    """Return by how many bytes the peak would fall if these storages died at these operators."""
    storages = list(profile.storages)
    for number, death in deaths.items():
        storage = storages[number]
        death = min(max(death, storage.birth, 0), storage.death)
        storages[number] = replace(storage, death=death)
    before = max(timeline(profile).high, default=0)
    return before - max(timeline(replace(profile, storages=storages)).high, default=0)


def dropped_unread(profile: Profile, kind: Kind) -> list[int]:
    """Return storages of the previous step that this one drops without having read or written them."""
    count, last = len(profile.operators), _last_use(profile)
    return [
        number
        for number, storage in enumerate(profile.storages)
        if storage.kind == kind and storage.birth < 0 < storage.death < count and not last[number]
    ]


def named(profile: Profile) -> dict[int, dict[int, int]]:
    """Return tensors that a variable holds past their last use, by the operator that created them.

    Each has the earliest operator after which it could have died, as does the tensor that the variable
    still held from the previous step.
    """
    count, last = len(profile.operators), _last_use(profile)
    olds: dict[int, list[int]] = defaultdict(list)
    for number in dropped_unread(profile, "input"):
        olds[profile.storages[number].bytes].append(number)
    by_maker: dict[int, dict[int, int]] = {}
    for number, storage in enumerate(profile.storages):
        if storage.birth >= 0 and storage.death == count and storage.kind in _RESULTS:
            deaths = by_maker.setdefault(storage.birth, {})
            deaths[number] = last[number]
            if olds[storage.bytes]:
                deaths[olds[storage.bytes].pop(0)] = 0
    return by_maker


def locals_past_use(profile: Profile) -> dict[Place, dict[int, int]]:
    """Return results that a local variable alone keeps past their last use, by the line that made them.

    Each has the earliest operator after which it could have died. Libraries' variables are left out.
    """
    last = _last_use(profile)
    found: dict[Place, dict[int, int]] = defaultdict(dict)
    for number, storage in enumerate(profile.storages):
        if storage.birth >= 0 and last[number] < storage.kept == storage.death:
            place, maker = profile.place_of(storage.birth), profile.operators[storage.birth]
            if place is not None and maker.caller < 0:
                found[place][number] = last[number]
    return found


def retained(profile: Profile) -> dict[int, int]:
    """Return saved tensors that autograd keeps after backward used them, each with its earliest possible
    death.

    Empty unless most saved tensors are kept, as with a retained graph, and no second backward uses them.
    """
    backward = (i for i, op in enumerate(profile.operators) if op.phase in _BACKWARD)
    end, last = max(backward, default=-1) + 1, _last_use(profile)
    used = {
        saved.storage
        for saved in profile.saved
        if saved.unpacked >= 0 and profile.storages[saved.storage].kind == "activation"
    }
    kept = {n: last[n] for n in used if profile.storages[n].death > end}
    again = any(saved.asked > 1 and saved.storage in kept for saved in profile.saved)
    return {} if again or len(kept) < max(_FEW, _HALF * len(used)) else kept


def unused_graphs(profile: Profile) -> dict[Call, dict[int, int]]:
    """Return storages that root calls with gradients created but no backward used, each with its earliest
    possible death. Outputs are left out: they belong to the caller."""
    reached = {op.forward for op in profile.operators if op.phase in _BACKWARD}
    reached |= {saved.saver for saved in profile.saved if saved.unpacked >= 0}
    last, unused = _last_use(profile), {}
    for call in profile.calls:
        span = range(call.first, call.last)
        if call.depth == 0 and call.graded and span and reached.isdisjoint(span):
            created = {n for n, storage in enumerate(profile.storages) if storage.birth in span}
            unused[call] = {n: last[n] for n in created - {*call.outputs}}
    return unused


def averages(profile: Profile) -> list[int]:
    """Return storages written from parameters after the optimizer's step, such as their moving average."""
    trained = _trained(profile)
    written = {
        number
        for op in profile.operators
        if op.phase == "other" and any(use.storage in trained for use in op.inputs)
        for number in op.mutates
        if profile.storages[number].birth < 0
        and profile.storages[number].kind not in ("optimizer_state", "gradient")
    }
    return sorted(written - trained)


def _trained(profile: Profile) -> set[int]:
    return {update.parameter for step in profile.optimizer_steps for update in step.updates}


def references(profile: Profile) -> list[int]:
    """Return the frozen parameters of a root model about as large as the trained one, or larger."""
    trained = _trained(profile)
    size = sum(profile.storages[n].bytes for n in trained)
    roots = {profile.modules[c.module].path for c in profile.calls if c.depth == 0 and not c.graded}
    frozen = [
        n
        for n, storage in enumerate(profile.storages)
        if storage.kind == "parameter" and n not in trained
        if storage.name.partition(".")[0] in roots
    ]
    close = abs(sum(profile.storages[n].bytes for n in frozen) - size) <= size / 20
    return frozen if size and close else []


@remembered
def _last_use(profile: Profile) -> tuple[int, ...]:
    """Return for each storage the operator after the last one that needs it, or 0."""
    last = [max(storage.birth + 1, 0) for storage in profile.storages]
    for index, op in enumerate(profile.operators):
        for n in (*(use.storage for use in (*op.inputs, *op.outputs)), *op.mutates):
            last[n] = index + 1
    for saved in profile.saved:
        last[saved.storage] = max(last[saved.storage], saved.unpacked + 1)
    return tuple(last)
