"""A pipeline in words, as tables, and as bars."""

from __future__ import annotations

from html.parser import HTMLParser

import pytest
from msgspec.structs import replace

from report import samples
from torchtrim.records.pipeline import Bar, Pipeline, PipelineReport, ScheduleFigures, Stage
from torchtrim.records.report import Report
from torchtrim.report import html, stages
from torchtrim.report.formats import markdown


def stage(first: str, rank: int, *, recompute: bool = False) -> Stage:
    return Stage(
        first=first,
        rank=rank,
        forward_seconds=0.001,
        backward_seconds=0.002,
        held_bytes=3 * 2**20,
        state_bytes=2**20,
        recompute=recompute,
    )


PIPELINE = Pipeline(
    root="Net",
    cuts=("blocks.2",),
    schedule="1F1B",
    ranks=2,
    microbatches=4,
    replicas=2,
    seconds=0.02,
    bubble=0.2,
    peaks=(9 * 2**20, 5 * 2**20),
    stages=(stage("", 0), stage("blocks.2", 1, recompute=True)),
)
FOUND = PipelineReport(
    pipeline=PIPELINE,
    in_flight=(2, 1),
    schedules=(
        ScheduleFigures(
            schedule="1F1B", microbatches=4, seconds=0.02, bubble=0.2, peak_bytes=9 * 2**20
        ),
    ),
    bars=(
        Bar(rank=0, stage=0, kind="F", batch=0, start=0.0, end=0.001),
        Bar(rank=1, stage=1, kind="F", batch=0, start=0.001, end=0.002),
        Bar(rank=1, stage=1, kind="B", batch=0, start=0.002, end=0.004),
    ),
)
REPORT: Report = replace(samples.PLANNING, pipeline=FOUND)


def test_lines_say_what_is_planned() -> None:
    whole, first, second = stages.lines(FOUND)
    assert whole == "1F1B: 2 stages on 2 ranks x 2 replicas, 4 micro-batches, bubble 20 %"
    assert first.startswith("stage 0 on rank 0, from the start: 1.00 ms + 2.00 ms, 3.00 MiB x 2 in")
    assert "recomputes; its rank's peak 5.00 MiB" in second


class _Bars(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.lefts: list[tuple[float, float, str]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = dict(attrs)
        if tag == "rect":
            left, wide = float(found["x"] or 0), float(found["width"] or 0)
            self.lefts.append((left, wide, found["y"] or ""))


def test_bars_lie_where_the_actions_are() -> None:
    drawn = _Bars()
    drawn.feed(stages.bars(FOUND))
    assert drawn.lefts == [
        (0.0, pytest.approx(250), "0"),
        (pytest.approx(250), pytest.approx(250), "30"),
        (pytest.approx(500), pytest.approx(500), "30"),
    ]


def test_pages_have_the_pipeline_and_are_harmless() -> None:
    page = html.render(REPORT, None, None)
    assert '<svg class="schedule"' in page
    assert "1 (recomputes)" in page
    assert "1F1B: 2 stages on 2 ranks" in markdown.render(REPORT)
    bad = replace(PIPELINE, stages=(stage(samples.HOSTILE, 0), stage("b", 1)))
    hostile = replace(REPORT, pipeline=replace(FOUND, pipeline=bad))
    assert "<script>alert" not in html.render(hostile, None, None)
    assert "\x1b" not in html.render(hostile, None, None)


def test_what_has_no_bars_is_not_drawn() -> None:
    assert stages.bars(replace(FOUND, bars=())) == ""
