"""Who allocated a block: the place in the user's source, and the phase of the step, from its stack."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from torchtrim.records.snapshot import Frame
from torchtrim.records.snapshot_report import Kind, SnapshotHolder

_LIBRARY = re.compile(
    r"site-packages|dist-packages|[/\\]lib[/\\]python\d|[/\\]Lib[/\\](?!site)|^<frozen|[/\\]torch[/\\]"
)
_RUNNERS = re.compile(r"^<|runpy\.py$|ipykernel|threading\.py$")
_OPTIMIZER = re.compile(r"[/\\]torch[/\\]optim[/\\]|\boptimizers?\.py$")
_BACKWARD = re.compile(
    r"autograd::(?:Engine|.*Backward)|_engine_run_backward|::backward\(|Backward0"
)
_MOST_WITHIN = 4  # Calls around a place that are shown.
_MOST_CALLS = 3  # Functions of libraries that one place calls.


class Place(NamedTuple):
    """Where a block was allocated."""

    kind: Kind
    path: str = ""
    line: int = 0
    function: str = ""
    within: tuple[str, ...] = ()
    by: str = ""


def place_of(frames: Sequence[Frame], *, before: bool = False) -> Place:
    """Return the place of a stack, innermost frame first. `before`: allocated before the first event."""
    python = [frame for frame in frames if frame.line > 0 and frame.filename.endswith(".py")]
    own = [frame for frame in python if _is_own(frame)] or _of_libraries(python)
    kind: Kind = "held before" if before else _kind(frames)
    by = _library_call(python, own)
    if not own:
        return Place(kind, by=by)
    first, *outer = own
    within = tuple(f"{_short(frame.filename)}:{frame.line} {frame.name}" for frame in outer)
    return Place(
        kind,
        _short(first.filename),
        first.line,
        first.name,
        within[:_MOST_WITHIN][::-1],
        by,
    )


def holders(blocks: Iterable[tuple[Place, int]]) -> tuple[SnapshotHolder, ...]:
    """Sum live blocks by place, largest first."""
    groups: dict[Place, list[tuple[Place, int]]] = {}
    for place, size in blocks:
        key = place._replace(by="", within=()) if place.path else place
        groups.setdefault(key, []).append((place, size))
    found = [_holder(group) for group in groups.values()]
    return tuple(sorted(found, key=lambda holder: -holder.bytes))


def _holder(group: list[tuple[Place, int]]) -> SnapshotHolder:
    calls = dict.fromkeys(place.by for place, _ in group if place.by)
    return SnapshotHolder(
        **group[0][0]._replace(by=", ".join([*calls][:_MOST_CALLS]))._asdict(),
        bytes=sum(size for _, size in group),
        count=len(group),
    )


def _is_own(frame: Frame) -> bool:
    return not _LIBRARY.search(frame.filename) and not _RUNNERS.search(frame.filename)


def _of_libraries(python: Sequence[Frame]) -> list[Frame]:
    """Return the frames of libraries other than PyTorch, for programs that have no source of their own."""
    return [
        frame
        for frame in python
        if re.search(r"(?:site|dist)-packages[/\\](?!torch[/\\])", frame.filename)
    ]


def _kind(frames: Sequence[Frame]) -> Kind:
    if any(_OPTIMIZER.search(frame.filename) and frame.line for frame in frames):
        return "optimizer"
    if any(_BACKWARD.search(frame.name) for frame in frames):
        return "backward"
    if any(frame.name in {"forward", "_call_impl"} for frame in frames):
        return "forward"
    return "other"


def _library_call(python: Sequence[Frame], own: Sequence[Frame]) -> str:
    """Return the library's function that the user's code called, such as `nn/modules/linear.py forward`."""
    inner = python[: python.index(own[0])] if own else python
    for frame in inner:
        if not frame.name.startswith("_") and "torch" in frame.filename:
            return f"{_short(frame.filename, 'torch')} {frame.name}"
    return ""


def _short(path: str, after: str = "") -> str:
    """Return the last two parts of a path, or those after a folder."""
    parts = [part for part in re.split(r"[/\\]", path) if part]
    if after and after in parts:
        return "/".join(parts[parts.index(after) + 1 :])
    return "/".join(parts[-2:])
