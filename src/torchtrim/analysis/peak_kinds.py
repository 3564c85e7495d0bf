"""What a peak is made of, in a handful of words: state, gradients, activations of which blocks, loss."""

from __future__ import annotations

import re
from collections import Counter

from torchtrim.analysis.timeline import alive, peak_operator, workspace
from torchtrim.records.lever import Part
from torchtrim.records.profile import Kind, Profile

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


def peak_parts(profile: Profile) -> tuple[Part, ...]:
    """What is live at the peak, the largest part first; the parts add up to the peak."""
    at = peak_operator(profile)
    found: Counter[str] = Counter()
    for number in alive(profile, at):
        found[_what(profile, number)] += profile.storages[number].counted
    found["workspace"] += workspace(profile, at)
    blocks = [what for what, _ in found.most_common() if what.startswith(_ACTIVATIONS)]
    for what in blocks[_MOST_BLOCKS:]:
        found[_REST] += found.pop(what)
    return tuple(Part(what=what, bytes=size) for what, size in found.most_common() if size)


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
    """`Net.blocks.*` for what a repeated block made, else the module's two top levels."""
    path = profile.modules[module].path
    match = _BLOCK.match(path)
    if match is None:
        return _ACTIVATIONS + ".".join(path.split(".")[:2])
    return f"{_ACTIVATIONS}{match[0].rpartition('.')[0]}.*"
