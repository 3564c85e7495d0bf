"""Findings about host-device syncs, and facts about the lines that cause them."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence

from torchtrim.analysis.user_source import CodeLine, line_at, line_of
from torchtrim.records.finding import Finding
from torchtrim.records.operator_names import base_name
from torchtrim.records.profile import Operator, Place, Profile, Sync
from torchtrim.syncs.base import SYNC_CODES
from torchtrim.syncs.explicit import is_unknown
from torchtrim.syncs.lookup import row

_CALLS = {"local_scalar_dense": "item", "to_copy": "to"}
"""Calls in user code by the names of the operators that they run."""
_MOST_NAMED = 3  # Arbitrary: as many names as fit one line of a message.
CODES = tuple(SYNC_CODES)


def sync_numbers(profile: Profile, findings: Iterable[Finding]) -> list[tuple[int, ...]]:
    """Return the numbers of each finding's syncs."""
    numbers: dict[tuple[str, str, int], list[int]] = defaultdict(list)
    codes = {name: code_of(name) for name in {sync.row for sync in profile.syncs}}
    for number, sync in enumerate(profile.syncs):
        numbers[codes[sync.row], *line_of_sync(profile, sync)].append(number)
    return [tuple(numbers[one.code, one.path, one.line]) for one in findings]


def waits_by_line(profile: Profile, code: str) -> dict[CodeLine, list[Sync]]:
    """Group the syncs that a rule reports by the line that caused them."""
    lines: dict[CodeLine, list[Sync]] = defaultdict(list)
    known = {name for name in {sync.row for sync in profile.syncs} if code_of(name) == code}
    for sync in profile.syncs:
        if sync.row in known:
            lines[line_of_sync(profile, sync)].append(sync)
    return dict(lines)


def waits_in(profile: Profile) -> tuple[tuple[str, int, str, str, int], ...]:
    """Return each line that synchronizes: path, line, description, row of the table, count. Races do not
    count."""
    counts = Counter(
        (line_of_sync(profile, sync), sync.row)
        for sync in profile.syncs
        if code_of(sync.row) in CODES
    )
    return tuple(
        (line.path, line.line, row(name).what, name, count)
        for (line, name), count in counts.items()
    )


def waiting_findings(profile: Profile, code: str) -> Iterator[Finding]:
    """Yield a finding for each line that synchronizes."""
    for line, syncs in waits_by_line(profile, code).items():
        measured = [sync.seconds for sync in syncs if sync.seconds is not None]
        price = sum(measured) * 1e3 if measured else None  # Only a real device shows it.
        inside = inside_libraries(library_place(profile, sync) for sync in syncs)
        cost = f", {price:.3g} ms in all" if price is not None else ""
        yield line.finding(
            code,
            f"{SYNC_CODES[code]} {times(len(syncs))} a step "
            f"({', '.join(_counted(profile, syncs))}){cost}{inside}",
            advice(profile, syncs),
            count_per_step=len(syncs),
            price_ms=price,
            source="measured" if price is not None else "modelled",
        )


def unknown_operators(profile: Profile) -> Counter[str]:
    """Count device operators whose source was not read, so it is unknown whether they synchronize."""
    on_device = [not storage.device.startswith("cpu") for storage in profile.storages]
    return Counter(
        base_name(op.name)
        for op in profile.operators
        if is_unknown(op.name) and any(on_device[use.storage] for use in (*op.inputs, *op.outputs))
    )


def unknown_note(profile: Profile) -> str:
    """Return the report's note about unknown operators, or an empty text."""
    counts = unknown_operators(profile)
    if not counts:
        return ""
    named = ", ".join(f"{name} ({times(count)})" for name, count in counts.most_common(_MOST_NAMED))
    more = f" and {len(counts) - _MOST_NAMED} more" if len(counts) > _MOST_NAMED else ""
    return f"operators whose source was not read, so whether they wait is unknown: {named}{more}"


def inside_libraries(places: Iterable[Place | None]) -> str:
    """Name the library lines that a user's line led to, most frequent first, for a message."""
    counts = Counter(place for place in places if place is not None)
    if not counts:
        return ""
    named = ", ".join(
        f"{_short(place)}{f' ({times(count)})' if len(counts) > 1 else ''}"
        for place, count in counts.most_common(_MOST_NAMED)
    )
    more = f" and {len(counts) - _MOST_NAMED} more lines" if len(counts) > _MOST_NAMED else ""
    return f", inside {named}{more}"


def library_place(profile: Profile, sync: Sync) -> Place | None:
    """Return the innermost library line of a sync, if the user's own line only led to it."""
    if sync.operator >= 0:
        return library_place_of(profile, sync.operator)
    return _library(profile, sync)


def library_place_of(profile: Profile, operator: int) -> Place | None:
    """Return the innermost library line of an operator; for one in backward, of its forward operator."""
    forward = profile.operators[operator].forward
    return _library(profile, profile.operators[forward if forward >= 0 else operator])


def _library(profile: Profile, called: Sync | Operator) -> Place | None:
    led = min(called.place, called.caller) >= 0 and called.place != called.caller
    return profile.places[called.place] if led else None


def _short(place: Place) -> str:
    """Format a place as `torchmetrics/metric.py:471 in compute`."""
    parts = place.path.replace("\\", "/").split("/")
    return f"{'/'.join(parts[-2:])}:{place.line} in {place.function}"


def advice(profile: Profile, syncs: Sequence[Sync]) -> str:
    """Return the table's advice for each kind of sync that the line has."""
    if all(sync.phase == "optimizer" for sync in syncs):
        return (
            "the optimizer keeps a number on the device that it needs on the host: "
            "use fused=True or capturable=True, or load its state so that `step` stays on the CPU"
        )
    return " ".join(dict.fromkeys(row(sync.row).advice for sync in syncs))


def times(count: int) -> str:
    """Format a count as `once`, `twice`, `3 times`."""
    return {1: "once", 2: "twice"}.get(count, f"{count} times")


def code_of(name: str) -> str:
    """Return the code of a row, or an empty text for a row that only a newer torchtrim knows."""
    try:
        return row(name).code
    except KeyError:
        return ""


def line_of_sync(profile: Profile, sync: Sync) -> CodeLine:
    """Return the line that synchronizes."""
    if sync.operator >= 0:
        return line_of(profile, sync.operator)
    index = sync.caller if sync.caller >= 0 else sync.place
    return line_at(profile, profile.places[index] if index >= 0 else None)


def _counted(profile: Profile, syncs: Sequence[Sync]) -> Iterator[str]:
    """Yield texts such as `index`, `2 x index_put in backward`, `synchronize`."""
    counts = Counter(
        (_name(profile, sync), " in backward" if sync.phase == "backward" else "") for sync in syncs
    )
    for (name, phase), count in counts.items():
        yield f"{f'{count} x ' if count > 1 else ''}{name}{phase}"


def _name(profile: Profile, sync: Sync) -> str:
    if sync.operator < 0:
        return sync.row
    name = base_name(profile.operators[sync.operator].name).rpartition("::")[2].strip("_")
    return _CALLS.get(name, name)
