"""Lists the storages live at the peak, largest first, in full and as a summary of a few parts."""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from pathlib import PurePath

from msgspec.structs import replace

from torchtrim.analysis.tensor_words import what_is
from torchtrim.analysis.timeline import WORKSPACE, alive, peak_operator, timeline, workspace
from torchtrim.analysis.why_live import standing, why_alive
from torchtrim.core.units import format_bytes
from torchtrim.records.figures import PeakPart
from torchtrim.records.operator_names import item_bytes, module_paths, owner, top_levels, word_of
from torchtrim.records.profile import Kind, Module, Operator, Place, Profile, is_emulated
from torchtrim.records.report import Holder

_BY_MODULE: frozenset[Kind] = frozenset(
    ("parameter", "buffer", "optimizer_state", "gradient", "gathered")
)
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.|$)")
_NOWHERE = Place(path="", line=0, function="")
_Key = tuple[object, ...]


def holders(profile: Profile, at: int | None = None, most: int = 12) -> tuple[Holder, ...]:
    """List the storages live at the peak, or at operator `at`, largest first.

    Computed tensors are grouped by kind, module, line, reason and sort; parameters and gradients by
    the top two levels of their module; optimizer state by its optimizer, with the line of the update. Equal
    groups of modules of one class, made at one line, become one, with `*` for the numbers that differ:
    `net.layers.*.linear`. The bytes add up to the peak: beyond `most` entries, the last one, of kind `rest`,
    is the sum of the others.
    """
    at = peak_operator(profile) if at is None else at
    modules = {module.path: module for module in profile.modules}
    groups = _sum_by(_single(profile, at), lambda h: (h.module, *_alike(h)))
    if size := workspace(profile, at):
        why = f"scratch of {word_of(profile.operators[at].name)} while it runs"
        scratch = _entry(size, WORKSPACE, profile.module_of(at), profile.place_of(at), why)
        groups.append(scratch)
    groups = [_constructed(profile, modules.get(holder.module), holder) for holder in groups]
    # Equal groups differ only in the numbers of their module's path.
    merged = _sum_by(
        groups,
        lambda h: (
            *(_NUMBER.sub("*", h.module), *_alike(h), h.bytes, h.count),
            *(h.type, h.made_path, h.made_line),
        ),
    )
    merged.sort(key=lambda h: (-h.bytes, h.kind, h.module, h.path, h.line, h.why))
    if len(merged) <= most:
        return tuple(merged)
    rest = merged[most - 1 :]
    last = _entry(sum(h.bytes for h in rest), "rest", "", None, f"{len(rest)} smaller groups")
    return (*merged[: most - 1], replace(last, count=sum(h.count for h in rest)))


def _alike(holder: Holder) -> _Key:
    return (holder.kind, holder.path, holder.line, holder.why, holder.what)


def _constructed(profile: Profile, module: Module | None, holder: Holder) -> Holder:
    """Add the module's class and the line that constructed it."""
    if module is None:
        return holder
    made = profile.places[module.made] if module.made >= 0 else _NOWHERE
    return replace(holder, type=module.type, made_path=made.path, made_line=made.line)


def _single(profile: Profile, at: int) -> Iterator[Holder]:
    indices = alive(profile, at)
    modules = module_paths(profile)
    updated = {
        step.optimizer: profile.place_of(step.first)
        for step in profile.optimizer_steps
        if step.first < len(profile.operators)
    }
    for index, why in why_alive(profile, indices, at).items():
        storage, module = profile.storages[index], owner(profile, index, modules)
        if not storage.counted:
            continue
        place = profile.place_of(storage.birth) if storage.birth >= 0 else None
        if storage.kind in _BY_MODULE:
            place, module = updated.get(module), top_levels(module)
        what = what_is(profile, index)
        yield _entry(storage.counted, storage.kind, module, place, why, what)


def _entry(
    size: int, kind: str, module: str, place: Place | None, why: str, what: str = ""
) -> Holder:
    at = place or _NOWHERE
    return Holder(
        bytes=size,
        count=1,
        kind=kind,
        module=module,
        path=at.path,
        line=at.line,
        why=why,
        what=what,
    )


def _sum_by(holders: Iterable[Holder], key: Callable[[Holder], _Key]) -> list[Holder]:
    groups: dict[_Key, list[Holder]] = defaultdict(list)
    for holder in holders:
        groups[key(holder)].append(holder)
    return [
        replace(
            group[0],
            bytes=sum(holder.bytes for holder in group),
            count=sum(holder.count for holder in group),
            module=_pattern([holder.module for holder in group]),
        )
        for group in groups.values()
    ]


def _pattern(modules: Iterable[str]) -> str:
    """Return a path with `*` in place of what differs in paths of equal length."""
    levels = zip(*(module.split(".") for module in modules), strict=True)
    return ".".join("*" if len({*level}) > 1 else level[0] for level in levels)


_MOST_BLOCKS = 3  # Arbitrary; the rest is one line, so that a report stays short.
_ACTIVATIONS, _OUTSIDE = "activations of ", "results outside modules"
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
    for start, rest in ((_ACTIVATIONS, "other activations"), (_OUTSIDE, f"other {_OUTSIDE}")):
        alike = [what for what, _ in parts.most_common() if what.startswith(start)]
        for what in alike[_MOST_BLOCKS:]:
            parts[rest] += parts.pop(what)
    return tuple(PeakPart(what=what, bytes=size) for what, size in parts.most_common() if size)


def _what(profile: Profile, number: int) -> str:
    storage = profile.storages[number]
    if storage.kind == "input" and number in standing(profile):
        return standing(profile)[number]
    if storage.kind in _WORDS or storage.birth < 0:
        return _WORDS.get(storage.kind, "input")
    op = profile.operators[storage.birth]
    if op.phase == "optimizer":
        return "optimizer temporaries"
    if op.phase not in ("forward", "recompute", "backward"):
        return "other"
    if op.phase == "backward":
        return "gradients of activations"
    if op.module < 0:
        place = profile.place_of(storage.birth)
        return f"{_OUTSIDE} ({PurePath(place.path).name}:{place.line})" if place else _OUTSIDE
    kind = profile.modules[op.module].type
    return f"results of {kind}" if kind.endswith("Loss") else _block(profile, op.module)


def _block(profile: Profile, module: int) -> str:
    """Return `Net.blocks.*` for a tensor of a repeated block, else the module's two top levels."""
    path = profile.modules[module].path
    match = _BLOCK.match(path)
    if match is None:
        return _ACTIVATIONS + ".".join(path.split(".")[:2])
    return f"{_ACTIVATIONS}{match[0].rpartition('.')[0]}.*"


_HALVES = ("bfloat16", "float16")
_BY_ONEDNN = ("convolution", "mkldnn")
_PRODUCTS = ("matmul", "batched matmul")


_LARGEST_WORKSPACE = 3.6
"""Bytes of cuDNN's largest recorded workspace for each byte that its convolution reads and writes.

54 MiB for 3 x 3 kernels on 512 channels, on a V100: pytorch/kineto at 9d1ce6a, tb_plugin/samples, traces of a
ResNet-50. `bench.against_gpus` measures it.
"""


def workspace_rise(profile: Profile) -> int:
    """Return how far the largest recorded workspaces for convolutions would raise an emulated peak."""
    high = timeline(profile).high
    raised = (
        top + _LARGEST_WORKSPACE * _handled(operator)
        for top, operator in zip(high, profile.operators, strict=True)
        if "convolution" in operator.name
    )
    return max(0, int(max(raised, default=0)) - max(high, default=0))


def _handled(operator: Operator) -> int:
    """Return the bytes of a convolution's tensors. Backward computes its results one after the other."""
    backward = "backward" in operator.name
    uses = operator.inputs if backward else (*operator.inputs, *operator.outputs)
    return sum(math.prod(use.shape) * item_bytes(use.dtype) for use in uses)


def library_note(profile: Profile) -> str:
    """Return the report's note about memory of cuDNN or oneDNN that no figure counts, or an empty text."""
    return _cudnn_note(profile) if is_emulated(profile.device) else _onednn_note(profile)


def _cudnn_note(profile: Profile) -> str:
    rise = workspace_rise(profile)
    if not rise:
        return ""
    return (
        "cuDNN's workspaces for convolutions are not counted: half of the recorded ones take none, and the "
        f"largest that a GPU recorded would raise this peak by {format_bytes(rise)} (docs/emulated.md)"
    )


def _onednn_note(profile: Profile) -> str:
    kept = profile.device == "cpu" and any(
        any(word in operator.name for word in _BY_ONEDNN)
        or (
            word_of(operator.name) in _PRODUCTS
            and any(use.dtype in _HALVES for use in operator.outputs)
        )
        for operator in profile.operators
    )
    if not kept:
        return ""
    return (
        "oneDNN computes parts of this step, and keeps a few MiB of compiled kernels and reordered weights "
        "that torch's allocator does not count: the same with and without a plan (docs/peaks.md)"
    )
