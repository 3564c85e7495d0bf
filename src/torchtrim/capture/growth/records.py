"""What a watched stream grows by, as records: a profile for the rules, figures for the report."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch

from torchtrim import __version__
from torchtrim.capture.growth.frames import Growing, Grown
from torchtrim.capture.growth.lines import Line
from torchtrim.errors import UsageError
from torchtrim.records.profile import Growth, Place, Profile
from torchtrim.records.report import Stream
from torchtrim.stream.growth import LEAST_FRAMES, adapter_for

_ENDLESS = 1_000_000


class Measured(NamedTuple):
    """What grew in a stream: a profile with `growths`, and its figures."""

    profile: Profile
    stream: Stream


def profile_of(growing: Growing, *, script: str, project: str) -> Profile:
    """The growths of a stream as a profile; of operators it knows nothing."""
    places = _Places()
    growths = [_growth(one, places) for one in growing.grown() if round(one.bytes)]
    return Profile(
        torchtrim=__version__,
        torch=str(torch.__version__),
        device="cpu",
        script=script,
        project=project,
        step_seconds=growing.frame_seconds(),
        peak_bytes=0,
        tracked_peak_bytes=0,
        reserved_bytes=None,
        rss_bytes=None,
        operators=[],
        storages=[],
        modules=[],
        calls=[],
        places=places.records,
        labels=[],
        waits=[],
        growths=growths,
    )


def stream_of(growing: Growing, profile: Profile) -> Stream:
    """The figures of a stream whose growths are in a profile."""
    return Stream(
        frame=growing.clock.what,
        frames=growing.frames,
        first=growing.first,
        growth_bytes=sum(one.bytes for one in profile.growths),
        process_growth_bytes=growing.process_growth(),
        frame_seconds=growing.frame_seconds(),
    )


def check_frames(growing: Growing) -> None:
    """Raises `UsageError` where there were too few frames to tell growth."""
    if growing.frames >= LEAST_FRAMES:
        return
    called = ", ".join(f"{name} ({count})" for name, count in growing.clock.calls.most_common(6))
    raise UsageError(
        f"{growing.frames} frames were seen, and growth shows in {LEAST_FRAMES} or more. A frame is "
        f"{growing.clock.what or 'a call of a module'}; called: {called or 'no module'}. Let the "
        "stream run longer, or name what a frame is: --frames-of CLASS, or the name of a function."
    )


def measure_growth(
    function: Callable[[], Any],
    *,
    frames_of: str | None = None,
    project: str | Path | None = None,
) -> Measured:
    """Call a function that streams some frames, and see what grows from frame to frame.

    A frame is a call of the module that is called first, or of what `frames_of` names: the class of a
    module, or a Python function. Growth is measured over the later two thirds of the frames. Containers of
    Python's and tensors are seen; memory of other libraries is in `process_growth_bytes` only.
    Raises `UsageError` for fewer than 6 frames.
    """
    folder = str(project or Path.cwd())
    growing = Growing(frames=_ENDLESS, project=folder, frames_of=frames_of)
    with growing:
        function()
    check_frames(growing)
    name = getattr(function, "__qualname__", "function")
    profile = profile_of(growing, script=name, project=folder)
    return Measured(profile, stream_of(growing, profile))


def _growth(one: Grown, places: _Places) -> Growth:
    filler = one.filler
    return Growth(
        name=one.owner.name,
        kind=one.kind,
        bytes=round(one.bytes),
        entries=round(one.entries, 2),
        adapter=adapter_for(one.owner.name, one.owner.classes),
        place=places.number(filler.place) if filler else -1,
        caller=places.number(filler.caller) if filler and filler.caller else -1,
    )


class _Places:
    """A table of lines, each once."""

    def __init__(self) -> None:
        self.records: list[Place] = []
        self._numbers: dict[Line, int] = {}

    def number(self, line: Line) -> int:
        if line not in self._numbers:
            self._numbers[line] = len(self.records)
            path = line.path if line.path.startswith("<") else str(Path(line.path).absolute())
            self.records.append(Place(path, line.line, line.function))
        return self._numbers[line]
