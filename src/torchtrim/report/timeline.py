"""The timeline of a step: a picture that works without scripts, and data for the script that zooms."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, get_args

import msgspec
from markupsafe import Markup

from torchtrim.core.units import format_bytes, format_seconds
from torchtrim.records import Profile
from torchtrim.records.operator_names import base_name
from torchtrim.records.profile import Phase
from torchtrim.report import facts
from torchtrim.report.charts import column_runs
from torchtrim.report.lanes import CopyLanes, Lanes, LaneSpan
from torchtrim.report.safe import clean, keep_right

_WIDTH = 1000  # Arbitrary; about one column per pixel of the page.
_HEIGHT = 100  # Arbitrary; lanes stretch to the height that the style sheet gives them.
_NAME = 48  # Arbitrary; longer names do not fit the line below the timeline.
_LEVELS = 3  # Arbitrary; deeper modules show after zooming in.
_SHADES = 4  # As many colours of modules as the style sheet has (`m-0` to `m-3`).
_LEAST = 1e-3  # Arbitrary; spans of no time still give an empty column their colour.


@dataclass(frozen=True, kw_only=True)
class Strip:
    """A lane of the picture: its name and its drawing."""

    name: str
    markup: Markup


class TimedStep(NamedTuple):
    """A step to draw, with its title."""

    title: str
    profile: Profile
    lanes: Lanes


@dataclass(frozen=True, kw_only=True)
class StepStrips:
    """The lanes of one step, with its title and its end."""

    title: str
    strips: Sequence[Strip]
    ends: str


@dataclass(frozen=True, kw_only=True)
class TimelineView:
    """The steps on one time axis. `data` is JSON for the script, empty if the page has no room."""

    steps: Sequence[StepStrips]
    data: Markup
    ends: str
    caption: str
    dropped: str


def timeline_view(steps: Sequence[TimedStep], most: int, *, source: bool) -> TimelineView | None:
    """Return the timelines with at most `most` operators for the script, or None if no step took time."""
    whole = max((step.lanes.seconds for step in steps), default=0.0)
    if not whole:
        return None
    top = max((size for step in steps for _, size, _ in step.lanes.memory), default=0) or 1
    shown = [_longest(step.lanes.host, most // len(steps)) for step in steps]
    return TimelineView(
        steps=[
            StepStrips(
                title=step.title if len(steps) > 1 else "",
                strips=_strips(step, whole, top),
                ends=format_seconds(step.lanes.seconds),
            )
            for step in steps
        ],
        data=_data(steps, shown, source=source) if all(shown) else Markup(),
        ends=format_seconds(whole),
        caption=_caption(steps),
        dropped=_dropped(steps, shown),
    )


@dataclass(frozen=True, kw_only=True)
class CopiesView:
    """The copies of a planned step, with their caption."""

    lanes: Sequence[Strip]
    ends: str
    caption: str


def copies_view(profile: Profile, copies: CopyLanes) -> CopiesView:
    """Return compute above the copies it hides, and the waits of compute."""

    def strip(name: str, spans: Sequence[LaneSpan], style: Callable[[LaneSpan], str]) -> Strip:
        return Strip(name=name, markup=_strip(spans, copies.seconds, style))

    return CopiesView(
        lanes=[
            strip("compute", copies.compute, lambda s: f"p-{profile.operators[s.index].phase}"),
            strip("out", copies.out, lambda _: "p-communication"),
            strip("back", copies.home, lambda _: "p-communication"),
            strip("waits", copies.awaited, lambda _: "p-waiting"),
        ],
        ends=format_seconds(copies.seconds),
        caption=copies.caption,
    )


def _longest(spans: Sequence[LaneSpan], most: int) -> list[LaneSpan]:
    if len(spans) <= most:
        return list(spans)
    return sorted(
        heapq.nlargest(most, spans, key=lambda span: span.seconds), key=lambda span: span.start
    )


def _caption(steps: Sequence[TimedStep]) -> str:
    lanes = steps[0].lanes
    axis = "Both on one time axis, without" if len(steps) > 1 else "Without"
    if lanes.source == "measured":
        return f"Measured with the recorder. {axis} the loader and the recorder's own work."
    return (
        f"Modelled: lower bounds for the host and an {lanes.device_name.upper()}, "
        f"from the operators' work and bytes. {axis} the loader."
    )


def _dropped(steps: Sequence[TimedStep], shown: Sequence[Sequence[LaneSpan]]) -> str:
    if not all(shown):
        return "No zooming, to keep this page small; `torchtrim export` writes the full timeline."
    every = [span.seconds for step in steps for span in step.lanes.host]
    kept = [span.seconds for spans in shown for span in spans]
    if len(kept) == len(every):
        return ""
    share = 100 * sum(kept) / (sum(every) or 1.0)
    return (
        f"Zoomed in, the timeline shows the {len(kept)} longest of {len(every)} operators, "
        f"{share:.1f} % of their time; profile.json has all."
    )


def _strips(step: TimedStep, whole: float, top: int) -> list[Strip]:
    lanes, operators = step.lanes, step.profile.operators
    styles = {phase: f"p-{phase}" for phase in get_args(Phase)}

    def phase(span: LaneSpan) -> str:
        return styles[operators[span.index].phase]

    strips: list[tuple[str, Iterable[LaneSpan], Callable[[LaneSpan], str]]] = [
        ("" if level else "modules", lane, lambda span: f"m-{span.index % _SHADES}")
        for level, lane in enumerate(lanes.modules[:_LEVELS])
    ]
    strips.append(("host", lanes.host, phase))
    strips += [("device", lanes.device, phase)] if lanes.device else []
    strips += [("waits", lanes.waits, lambda _: "p-waiting")] if lanes.waits else []
    return [
        Strip(name="memory", markup=_area(lanes, whole, top)),
        *(Strip(name=name, markup=_strip(spans, whole, style)) for name, spans, style in strips),
    ]


def _strip(spans: Iterable[LaneSpan], whole: float, style: Callable[[LaneSpan], str]) -> Markup:
    """Draw spans on columns. The style that fills most of a column colours it."""
    fills: list[dict[str, float]] = [{} for _ in range(_WIDTH)]
    scale = _WIDTH / whole
    for span in spans:
        name, first = style(span), scale * span.start
        last = first + scale * span.seconds
        for column in range(int(first), min(int(last) + 1, _WIDTH)):
            part = max(min(last, column + 1) - max(first, column), _LEAST)
            fills[column][name] = fills[column].get(name, 0.0) + part
    paths: dict[str, list[str]] = {}
    for name, start, end in column_runs(
        [max(fill, key=fill.__getitem__) if fill else "" for fill in fills]
    ):
        if name:
            paths.setdefault(name, []).append(f"M{start} 0H{end}V{_HEIGHT}H{start}Z")
    shapes = (
        Markup('<path class="{}" d="{}"/>').format(name, "".join(parts))
        for name, parts in paths.items()
    )
    return _svg(Markup().join(shapes))


def _area(lanes: Lanes, whole: float, top: int) -> Markup:
    points = [f"M0 {_HEIGHT}"]
    for time, size, _ in lanes.memory:
        x, y = round(_WIDTH * time / whole), round(_HEIGHT * (1 - size / top))
        points.append(f"H{x}V{y}")
    path = "".join([*points, f"H{round(_WIDTH * lanes.seconds / whole)}V{_HEIGHT}Z"])
    return _svg(Markup('<path class="area" d="{}"/>').format(path))


def _svg(shapes: Markup) -> Markup:
    return Markup(
        '<svg viewBox="0 0 {} {}" preserveAspectRatio="none" aria-hidden="true">{}</svg>'
    ).format(_WIDTH, _HEIGHT, shapes)


class _StringTable:
    def __init__(self) -> None:
        self.known: dict[str, int] = {}
        self._seen: dict[str, int] = {}

    def number(self, text: str) -> int:
        found = self._seen.get(text)
        if found is None:
            short = keep_right(clean(text), _NAME)
            found = self._seen[text] = self.known.setdefault(short, len(self.known))
        return found


def _data(
    steps: Sequence[TimedStep], shown: Sequence[Sequence[LaneSpan]], *, source: bool
) -> Markup:
    words = _StringTable()
    largest = max((size for step in steps for _, size, _ in step.lanes.memory), default=0)
    data = {
        "end": _us(max(step.lanes.seconds for step in steps)),
        "steps": [_step(*one, words, source) for one in zip(steps, shown, strict=True)],
        "top": [largest, format_bytes(largest)],
    }
    data["words"] = list(words.known)
    encoded = msgspec.json.encode(data).decode().replace("<", "\\u003c").replace("&", "\\u0026")
    return Markup(encoded)


def _step(
    step: TimedStep, shown: Sequence[LaneSpan], words: _StringTable, source: bool
) -> dict[str, object]:
    profile, lanes = step.profile, step.lanes
    allocated: Counter[int] = Counter()
    for storage in profile.storages:
        allocated[storage.birth] += storage.counted

    def times(span: LaneSpan) -> tuple[int, int]:
        return _us(span.start), _us(span.seconds)

    def name_and_phase(span: LaneSpan) -> tuple[int, int]:
        op = profile.operators[span.index]
        return words.number(base_name(op.name).removeprefix("aten::")), words.number(op.phase)

    def module_and_place(span: LaneSpan) -> tuple[int, int]:
        place = profile.place_of(span.index) if source else None
        where = facts.place(place.path, place.line, facts.home(profile)) if place else ""
        return words.number(profile.module_of(span.index)), words.number(where)

    most, indices = len(shown), {span.index for span in shown}
    return {
        "title": step.title,
        "host": [
            (*times(s), *name_and_phase(s), *module_and_place(s), allocated[s.index]) for s in shown
        ],
        "device": [(*times(s), *name_and_phase(s)) for s in lanes.device if s.index in indices],
        "modules": [
            [(*times(s), words.number(profile.modules[s.index].path)) for s in _longest(lane, most)]
            for lane in lanes.modules
        ],
        "waits": [(*times(s), words.number(s.name)) for s in _longest(lanes.waits, most)],
        "memory": [(_us(time), size) for time, size, _ in lanes.memory],
    }


def _us(seconds: float) -> int:
    """Return tenths of a microsecond, so that the data has no fractions."""
    return round(seconds * 1e7)
