"""Turns the growth of a stream into records: a profile for the rules, figures for the report."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from msgspec.structs import replace

from torchtrim import __version__
from torchtrim.capture.growth.frames import Growing
from torchtrim.capture.growth.lines import number_of
from torchtrim.errors import UsageError
from torchtrim.records.profile import Growth, Place, Profile
from torchtrim.records.report import StreamReport
from torchtrim.stream.growth import LEAST_FRAMES, adapter_for

_ENDLESS = 1_000_000
"""Frames: more than any call streams, so the function decides when to end."""


class MeasuredGrowth(NamedTuple):
    """A stream's growth: a profile with `growths`, and the stream's figures."""

    profile: Profile
    stream: StreamReport


def profile_of(growing: Growing, *, script: str, project: str) -> Profile:
    """Return the growths of a stream as a profile without operators."""
    places: list[Place] = []
    growths = [
        Growth(
            name=one.owner.name,
            kind=one.kind,
            bytes=round(one.bytes),
            entries=round(one.entries, 2),
            adapter=adapter_for(one.owner.name, one.owner.classes),
            place=number_of(places, one.filler and one.filler.place),
            caller=number_of(places, one.filler and one.filler.caller),
        )
        for one in growing.grown()
        if round(one.bytes)
    ]
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
        places=[
            one if one.path.startswith("<") else replace(one, path=str(Path(one.path).absolute()))
            for one in places
        ],
        labels=[],
        waits=[],
        growths=growths,
    )


def stream_of(growing: Growing, profile: Profile) -> StreamReport:
    """Return the figures of a stream from its profile."""
    return StreamReport(
        frame=growing.clock.what,
        frames=growing.frames,
        first=growing.first,
        growth_bytes=sum(one.bytes for one in profile.growths),
        process_growth_bytes=growing.process_growth(),
        frame_seconds=growing.frame_seconds(),
    )


def check_frames(growing: Growing) -> None:
    """Raise `UsageError` if there were too few frames to detect growth."""
    if growing.frames >= LEAST_FRAMES:
        return
    called = ", ".join(f"{name} ({count})" for name, count in growing.clock.calls.most_common(6))
    raise UsageError(
        f"{growing.frames} frames were seen, but detecting growth takes {LEAST_FRAMES}. A frame is "
        f"{growing.clock.what or 'a call of a module'}; called: {called or 'no module'}. Let the stream "
        "run longer, or define a frame with --frames-of: a module's class, or the name of a function."
    )


def measure_growth(
    function: Callable[[], Any],
    *,
    frames_of: str | None = None,
    project: str | Path | None = None,
) -> MeasuredGrowth:
    """Call a function that streams some frames, and measure growth from frame to frame.

    A frame is a call of the first module called, or of `frames_of`: the class of a module, or a Python
    function. Growth is measured over the last two thirds of the frames, in Python containers and tensors;
    only `process_growth_bytes` covers other libraries. Raises `UsageError` for fewer than 6 frames.
    """
    folder = str(project or Path.cwd())
    growing = Growing(frames=_ENDLESS, project=folder, frames_of=frames_of)
    with growing:
        function()
    check_frames(growing)
    name = getattr(function, "__qualname__", "function")
    profile = profile_of(growing, script=name, project=folder)
    return MeasuredGrowth(profile, stream_of(growing, profile))
