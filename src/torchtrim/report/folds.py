"""The step's time as charts show it: without the loader, and as long as it takes without the recorder."""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, groupby
from typing import NamedTuple

from torchtrim.core.units import format_seconds
from torchtrim.records import Profile
from torchtrim.report.lanes import Lanes, LaneSpan, Spans

_Cut = tuple[float, float]
_LOADER = "loader"


@dataclass(frozen=True, kw_only=True)
class FoldedLanes:
    """Lanes without the loader and without long gaps, and the seconds of both."""

    lanes: Lanes
    loader_seconds: float
    gap_seconds: float

    @property
    def caption(self) -> str:
        """Return a sentence on what the lanes leave out, or an empty string."""
        parts = [f"{format_seconds(self.loader_seconds)} of the loader"] * (self.loader_seconds > 0)
        if self.gap_seconds > 0:
            parts.append(f"{format_seconds(self.gap_seconds)} of the recorder between operators")
        return f"Left out: {' and '.join(parts)}." if parts else ""


def folded(profile: Profile, lanes: Lanes, step_seconds: float) -> FoldedLanes:
    """Fold the loader and, of a measured step, the gaps that the timed step of `step_seconds` cannot have."""
    gaps = [*_gaps(profile, lanes)]
    longest = float("inf")
    if lanes.source == "measured" and step_seconds:
        busy = lanes.seconds - sum(gap.end - gap.start for gap in gaps)
        left = step_seconds - busy - sum(gap.loader_seconds for gap in gaps)
        longest = _longest(sorted(gap.seconds for gap in gaps), left)
    cuts = [(gap.start + min(gap.seconds, longest), gap.end) for gap in gaps]
    return FoldedLanes(
        lanes=_without(profile, lanes, [(start, end) for start, end in cuts if end > start]),
        loader_seconds=sum(gap.loader_seconds for gap in gaps),
        gap_seconds=sum(max(gap.seconds - longest, 0.0) for gap in gaps),
    )


def ends_of(lanes: Lanes) -> list[float]:
    """Return where each operator's share of the host's time ends: where the next one starts."""
    starts = [span.start for span in lanes.host]
    return [*starts[1:], lanes.seconds] if starts else []


def _kept(profile: Profile, span: LaneSpan) -> bool:
    return profile.operators[span.index].phase != _LOADER


def _loading(profile: Profile, lanes: Lanes) -> Iterator[_Cut]:
    """Yield each run of the loader's operators, up to the next operator, and each wait for the loader."""
    spans = zip(lanes.host, ends_of(lanes), strict=True)
    for of_loader, run in groupby(spans, lambda pair: not _kept(profile, pair[0])):
        if of_loader:
            every = list(run)
            yield every[0][0].start, every[-1][1]
    for wait in lanes.waits:
        if wait.index < 0:
            yield wait.start, wait.start + wait.seconds


class _Gap(NamedTuple):
    """A span of waiting for the loader, without other operators."""

    start: float
    end: float
    loader_seconds: float

    @property
    def seconds(self) -> float:
        """The rest of the gap."""
        return max(self.end - self.start - self.loader_seconds, 0.0)


def _gaps(profile: Profile, lanes: Lanes) -> Iterator[_Gap]:
    loading = _joined([*_loading(profile, lanes)])
    starts = [start for start, _ in loading]
    end = 0.0
    kept = ((one.start, one.start + one.seconds) for one in lanes.host if _kept(profile, one))
    for first, last in (*kept, (lanes.seconds, lanes.seconds)):
        if first > end:
            near = loading[max(bisect_right(starts, end) - 1, 0) : bisect_right(starts, first)]
            loads = sum(max(min(b, first) - max(a, end), 0.0) for a, b in near)
            yield _Gap(end, first, loads)
        end = max(end, last)


def _longest(gaps: Sequence[float], left: float) -> float:
    """Return the longest gap to keep, so that ascending `gaps` cut to it take `left` seconds."""
    total = 0.0
    for number, gap in enumerate(gaps):
        share = (left - total) / (len(gaps) - number)
        if share < gap:
            return max(share, 0.0)
        total += gap
    return float("inf")


def _joined(cuts: Sequence[_Cut]) -> list[_Cut]:
    """Return the cuts in order, overlapping ones as one."""
    joined: list[_Cut] = []
    for start, end in sorted(cuts):
        if joined and start <= joined[-1][1]:
            joined[-1] = joined[-1][0], max(joined[-1][1], end)
        elif end > start:
            joined.append((start, end))
    return joined


def _without(profile: Profile, lanes: Lanes, cuts: Sequence[_Cut]) -> Lanes:
    starts = [start for start, _ in cuts]
    before = [0.0, *accumulate(end - start for start, end in cuts)]

    def shown(moment: float) -> float:
        number = bisect_right(starts, moment) - 1
        if number < 0:
            return moment
        start, end = cuts[number]
        return min(moment, start) + max(moment - end, 0.0) - before[number]

    def moved(spans: Sequence[LaneSpan], *, all_kept: bool = False) -> Sequence[LaneSpan]:
        kept = [s for s in spans if all_kept or (s.index >= 0 and _kept(profile, s))]
        first = [shown(span.start) for span in kept]
        last = [shown(span.start + span.seconds) for span in kept]
        seconds = array("d", (b - a for a, b in zip(first, last, strict=True)))
        indices = array("q", (span.index for span in kept))
        return Spans(array("d", first), seconds, indices, [span.name for span in kept])

    return replace(
        lanes,
        seconds=shown(lanes.seconds),
        host=moved(lanes.host),
        device=moved(lanes.device),
        modules=[moved(lane, all_kept=True) for lane in lanes.modules],
        waits=moved(lanes.waits),
        memory=[
            (shown(time), size, i)
            for time, size, i in lanes.memory
            if profile.operators[i].phase != _LOADER
        ],
    )
