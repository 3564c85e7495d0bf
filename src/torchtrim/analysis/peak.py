"""Lists what is live at the peak, largest first, in full and as a summary of a few parts."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable

from torchtrim.analysis.timeline import WORKSPACE, alive, peak_operator, workspace
from torchtrim.analysis.why_live import why_alive
from torchtrim.records.figures import PeakPart
from torchtrim.records.operator_names import base_name, module_paths, owner, top_levels
from torchtrim.records.profile import Kind, Place, Profile
from torchtrim.records.report import Holder

_BY_MODULE: frozenset[Kind] = frozenset(
    ("parameter", "buffer", "optimizer_state", "gradient", "gathered")
)
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.|$)")
_NOWHERE = Place(path="", line=0, function="")


def holders(profile: Profile, at: int | None = None, most: int = 12) -> tuple[Holder, ...]:
    """List what is live at the peak, or at operator `at`, largest first.

    Computed tensors are grouped by kind, module, line and reason; parameters, gradients and optimizer state
    by the top two levels of their module. Equal groups of repeated modules become one, with `*` for the
    number: `net.layers.*.linear`. The bytes add up to the peak: beyond `most` entries, the last one, of kind
    `rest`, is the sum of the others.
    """
    at = peak_operator(profile) if at is None else at
    found = [*_groups(profile, at), *_scratch(profile, at)]
    found = sorted(_merge_repeats(found), key=_order)
    return tuple(found if len(found) <= most else [*found[: most - 1], _rest(found[most - 1 :])])


def _order(holder: Holder) -> tuple[int, str, str, str, int, str]:
    return (-holder.bytes, holder.kind, holder.module, holder.path, holder.line, holder.why)


def _groups(profile: Profile, at: int) -> list[Holder]:
    indices = alive(profile, at)
    why = why_alive(profile, indices, at)
    modules = module_paths(profile)
    single = (
        _holder(profile, i, owner(profile, i, modules), why[i])
        for i in indices
        if profile.storages[i].counted
    )
    return _sum_by(single, lambda h: (h.kind, h.module, h.path, h.line, h.why))


def _holder(profile: Profile, index: int, module: str, why: str) -> Holder:
    storage = profile.storages[index]
    if storage.kind in _BY_MODULE:
        return _entry(storage.counted, storage.kind, top_levels(module), None, why)
    place = profile.place_of(storage.birth) if storage.birth >= 0 else None
    return _entry(storage.counted, storage.kind, module, place, why)


def _scratch(profile: Profile, at: int) -> list[Holder]:
    size = workspace(profile, at)
    if not size:
        return []
    why = f"scratch of {base_name(profile.operators[at].name)} while it runs"
    return [_entry(size, WORKSPACE, profile.module_of(at), profile.place_of(at), why)]


def _entry(size: int, kind: str, module: str, place: Place | None, why: str) -> Holder:
    at = place or _NOWHERE
    return Holder(
        bytes=size, count=1, kind=kind, module=module, path=at.path, line=at.line, why=why
    )


def _merge_repeats(found: Iterable[Holder]) -> list[Holder]:
    """Merge groups that differ only in the numbers of their module's path."""
    return _sum_by(
        found,
        lambda h: (h.kind, _pattern(h.module), h.path, h.line, h.why, h.bytes, h.count),
    )


def _sum_by(found: Iterable[Holder], key: Callable[[Holder], object]) -> list[Holder]:
    groups: dict[object, list[Holder]] = defaultdict(list)
    for holder in found:
        groups[key(holder)].append(holder)
    return [_total(group) for group in groups.values()]


def _total(group: list[Holder]) -> Holder:
    first = group[0]
    alike = all(holder.module == first.module for holder in group)
    return Holder(
        bytes=sum(holder.bytes for holder in group),
        count=sum(holder.count for holder in group),
        kind=first.kind,
        module=first.module if alike else _pattern(first.module),
        path=first.path,
        line=first.line,
        why=first.why,
    )


def _rest(found: list[Holder]) -> Holder:
    return Holder(
        bytes=sum(holder.bytes for holder in found),
        count=sum(holder.count for holder in found),
        kind="rest",
        module="",
        path="",
        line=0,
        why=f"{len(found)} smaller groups",
    )


def _pattern(module: str) -> str:
    return _NUMBER.sub("*", module)


_MOST_BLOCKS = 3  # Arbitrary; the rest is one line, so that a report stays short.
_ACTIVATIONS = "activations of "
_REST = "other activations"
_WORDS: dict[Kind, str] = {
    "parameter": "state",
    "buffer": "state",
    "optimizer_state": "state",
    "gradient": "gradients",
    "gathered": "parameters gathered from all ranks",
    "input": "input",
}
_BLOCK = re.compile(r".*?\.\d+(?=\.|$)")


def peak_parts(profile: Profile) -> tuple[PeakPart, ...]:
    """Summarize what is live at the peak, largest part first. The parts add up to the peak."""
    at = peak_operator(profile)
    found: Counter[str] = Counter()
    for number in alive(profile, at):
        found[_what(profile, number)] += profile.storages[number].counted
    found["workspace"] += workspace(profile, at)
    blocks = [what for what, _ in found.most_common() if what.startswith(_ACTIVATIONS)]
    for what in blocks[_MOST_BLOCKS:]:
        found[_REST] += found.pop(what)
    return tuple(PeakPart(what=what, bytes=size) for what, size in found.most_common() if size)


def _what(profile: Profile, number: int) -> str:
    storage = profile.storages[number]
    if storage.kind in _WORDS or storage.birth < 0:
        return _WORDS.get(storage.kind, "input")
    op = profile.operators[storage.birth]
    if op.phase == "optimizer":
        return "optimizer temporaries"
    if op.phase not in ("forward", "recompute", "backward"):
        return "other"
    if op.module < 0 or profile.modules[op.module].type.endswith("Loss"):
        return "loss"
    return "gradients of activations" if op.phase == "backward" else _block(profile, op.module)


def _block(profile: Profile, module: int) -> str:
    """Return `Net.blocks.*` for a tensor of a repeated block, else the module's two top levels."""
    path = profile.modules[module].path
    match = _BLOCK.match(path)
    if match is None:
        return _ACTIVATIONS + ".".join(path.split(".")[:2])
    return f"{_ACTIVATIONS}{match[0].rpartition('.')[0]}.*"
