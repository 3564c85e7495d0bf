"""What a step depends on most: the host, the device, the syncs between them, or the loader."""

from __future__ import annotations

from torchtrim.costs.replay.engine import replay
from torchtrim.costs.replay.one_stream import OneStream
from torchtrim.costs.replay.program import ReplayProgram
from torchtrim.records.trace import Bound

_WAITS, _MOST, _LOADER = 0.10, 0.90, 0.25


def bound(
    program: ReplayProgram | OneStream, *, gained: float, span: float, loading: float
) -> Bound:
    """The verdict, from replays. `gained` is what removing all waits gains; microseconds.

    `waits` where that is a tenth of the span; `device` or `host` where it alone, the other infinitely
    fast, takes nine tenths; `loader` where it is not the device and a quarter is spent in the data loader.
    """
    if span <= 0:
        return "unknown"
    host = replay(program, device=0.0).span / span
    device = replay(program, host=0.0).span / span
    if loading > _LOADER * span and host >= device:
        return "loader"
    if gained >= _WAITS * span:
        return "waits"
    if max(host, device) < _MOST:
        return "mixed"
    return "device" if device >= host else "host"
