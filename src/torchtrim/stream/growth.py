"""What grows, told from what only fills: judged from sizes at some frames of a stream. Pure functions.

A state that fills up to its bound grows too, at first. So growth counts only where it goes on: in the
second half of the frames as well as in the first, and never back.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Sequence
from typing import NamedTuple

from torchtrim.stream.sessions import SESSIONS

LEAST_FRAMES = 6  # Halves of three frames, so that each has two rises.
_LEAST_SHARE = 0.25  # Arbitrary, as keeps_growing says: what fills up slows down further.
_BOUND = {"Objects", "Records"}
_CACHES = {"DynamicCache", "DynamicLayer"}


class SizeSample(NamedTuple):
    """A size, in bytes or entries, at the end of a frame."""

    frame: int
    size: int


def keeps_growing(samples: Sequence[SizeSample]) -> bool:
    """Whether sizes never fall, and rise in the second half nearly as they do in the first.

    What fills up to a bound slows down; a quarter of the first half's rise is the border.
    """
    if len(samples) < 3 or any(b.size < a.size for a, b in itertools.pairwise(samples)):
        return False
    middle = _middle(samples)
    first, second = per_frame(samples[: middle + 1]), per_frame(samples[middle:])
    return second > 0 and second >= _LEAST_SHARE * first


def per_frame(samples: Sequence[SizeSample]) -> float:
    """What a frame adds, from the first sample to the last; 0 for fewer than two."""
    if len(samples) < 2 or samples[-1].frame <= samples[0].frame:
        return 0.0
    rise = samples[-1].size - samples[0].size
    return rise / (samples[-1].frame - samples[0].frame)


def looks_at(frame: int) -> bool:
    """Whether to look at the end of a frame, counted from 1: ever more seldom, so that streams of any
    length are looked at some ten times, the later two thirds of them four times or more."""
    look = 2
    while look < frame:
        look = max(look + 2, int(look * 1.35))
    return look == frame


def settled(samples: Sequence[SizeSample]) -> Sequence[SizeSample]:
    """The samples of the later two thirds of the frames, when what fills up at once is full; at least three,
    if there are."""
    last = samples[-1].frame if samples else 0
    late = [one for one in samples if 3 * one.frame >= last]
    return late if len(late) >= 3 else samples[-3:]


def _middle(samples: Sequence[SizeSample]) -> int:
    """The sample nearest to the middle frame, neither the first nor the last."""
    half = (samples[0].frame + samples[-1].frame) / 2
    return min(range(1, len(samples) - 1), key=lambda one: abs(samples[one].frame - half))


def adapter_for(name: str, classes: Collection[str]) -> str:
    """The function of `torchtrim.stream` that bounds the state there; empty for none.

    `classes` are those of the objects on the way to it.
    """
    if set(SESSIONS).intersection(classes):
        return "" if _BOUND.intersection(classes) else "bound_session"
    if "cond_frame_outputs" in name:
        return "" if _BOUND.intersection(classes) else "bound_state"
    if _CACHES.intersection(classes):
        return "sink_cache"
    return ""
