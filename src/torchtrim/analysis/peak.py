"""Lists the storages live at the peak, largest first, in full and as a summary of a few parts."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator

from msgspec.structs import replace

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
    """List the storages live at the peak, or at operator `at`, largest first.

    Computed tensors are grouped by kind, module, line and reason; parameters, gradients and optimizer state
    by the top two levels of their module. Equal groups of repeated modules become one, with `*` for the
    number: `net.layers.*.linear`. The bytes add up to the peak: beyond `most` entries, the last one, of kind
    `rest`, is the sum of the others.
    """
    at = peak_operator(profile) if at is None else at
    groups = _sum_by(_single(profile, at), lambda h: (h.kind, h.module, h.path, h.line, h.why))
    if size := workspace(profile, at):
        why = f"scratch of {base_name(profile.operators[at].name)} while it runs"
        scratch = _entry(size, WORKSPACE, profile.module_of(at), profile.place_of(at), why)
        groups.append(scratch)
    # Equal groups differ only in the numbers of their module's path.
    merged = _sum_by(
        groups, lambda h: (h.kind, _pattern(h.module), h.path, h.line, h.why, h.bytes, h.count)
    )
    merged.sort(key=lambda h: (-h.bytes, h.kind, h.module, h.path, h.line, h.why))
    if len(merged) <= most:
        return tuple(merged)
    rest = merged[most - 1 :]
    last = _entry(sum(h.bytes for h in rest), "rest", "", None, f"{len(rest)} smaller groups")
    return (*merged[: most - 1], replace(last, count=sum(h.count for h in rest)))


def _single(profile: Profile, at: int) -> Iterator[Holder]:
    indices = alive(profile, at)
    modules = module_paths(profile)
    for index, why in why_alive(profile, indices, at).items():
        storage, module = profile.storages[index], owner(profile, index, modules)
        if not storage.counted:
            continue
        place = profile.place_of(storage.birth) if storage.birth >= 0 else None
        if storage.kind in _BY_MODULE:
            place, module = None, top_levels(module)
        yield _entry(storage.counted, storage.kind, module, place, why)


def _entry(size: int, kind: str, module: str, place: Place | None, why: str) -> Holder:
    at = place or _NOWHERE
    return Holder(
        bytes=size, count=1, kind=kind, module=module, path=at.path, line=at.line, why=why
    )


def _sum_by(holders: Iterable[Holder], key: Callable[[Holder], object]) -> list[Holder]:
    groups: dict[object, list[Holder]] = defaultdict(list)
    for holder in holders:
        groups[key(holder)].append(holder)
    return [
        replace(
            group[0],
            bytes=sum(holder.bytes for holder in group),
            count=sum(holder.count for holder in group),
            module=group[0].module
            if len({holder.module for holder in group}) == 1
            else _pattern(group[0].module),
        )
        for group in groups.values()
    ]


def _pattern(module: str) -> str:
    return _NUMBER.sub("*", module)


_MOST_BLOCKS = 3  # Arbitrary; the rest is one line, so that a report stays short.
_ACTIVATIONS = "activations of "
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
    """Summarize the storages live at the peak, largest part first. The parts add up to the peak."""
    at = peak_operator(profile)
    parts: Counter[str] = Counter()
    for number in alive(profile, at):
        parts[_what(profile, number)] += profile.storages[number].counted
    parts["workspace"] += workspace(profile, at)
    blocks = [what for what, _ in parts.most_common() if what.startswith(_ACTIVATIONS)]
    for what in blocks[_MOST_BLOCKS:]:
        parts["other activations"] += parts.pop(what)
    return tuple(PeakPart(what=what, bytes=size) for what, size in parts.most_common() if size)


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
