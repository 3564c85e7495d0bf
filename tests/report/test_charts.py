"""The chart of memory against time: every plan a point, what is done by hand beside, and nothing outside."""

from __future__ import annotations

import re

from report import samples
from torchtrim.records.report import FrontierPoint
from torchtrim.report.charts import trade_off
from torchtrim.report.html import render


def point(peak: int, seconds: float, by_hand: str = "") -> FrontierPoint:
    return FrontierPoint(
        budget_bytes=peak, peak_bytes=peak, step_seconds=seconds, where=("Net.a",), by_hand=by_hand
    )


def places(markup: str, kind: str) -> list[tuple[float, float]]:
    found = re.findall(rf'<i class="{kind}" style="left:([\d.]+)%;bottom:([\d.]+)%', markup)
    return [(float(across), float(up)) for across, up in found]


def test_every_plan_is_a_point_and_what_is_done_by_hand_a_square() -> None:
    markup = trade_off([point(100, 1.0), point(50, 1.1), point(70, 1.3, "each block")])
    assert places(markup, "dot") == [(47.17, 31.45), (94.34, 0.0)]
    assert places(markup, "hand") == [(66.04, 94.34)]
    assert "each block" in markup


def test_stairs_go_from_plan_to_plan() -> None:
    markup = trade_off([point(100, 1.0), point(50, 2.0)])
    assert 'd="M472 57H943V1000H1000"' in markup


def test_a_front_without_times_stays_inside() -> None:
    markup = trade_off([point(100, 1.0), point(50, 1.0)])
    assert all(0 <= up <= 100 for _, up in places(markup, "dot"))


def test_one_point_is_no_chart() -> None:
    assert trade_off([point(1, 1.0)]) == ""


def test_the_page_has_the_chart() -> None:
    page = render(samples.PLANNING, None, None)
    assert 'class="chart trade"' in page
    assert "each block checkpointed" in page
