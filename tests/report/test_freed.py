"""Who frees what on the planned curve: bands between it and the original's, which never leave that room."""

from __future__ import annotations

import re

import pytest
from msgspec.structs import replace

from profiles import Step, training_step
from report import samples
from report.test_html import Page
from torchtrim.planner.freed import FreedBytes
from torchtrim.planner.planner import Planner
from torchtrim.records.budget import Budget
from torchtrim.records.profile import Phase, Profile
from torchtrim.records.report import PlanSummary
from torchtrim.report import html
from torchtrim.report.charts import Picture, picture
from torchtrim.report.freed import freed, predicted, same_operators

BEFORE, AFTER = samples.profile(412), samples.profile(236)


def drawn(profile: Profile) -> Picture:
    found = picture(profile, "Planned")
    assert found is not None
    return found


def evenly(bytes: int, name: str = "replay") -> FreedBytes:
    return FreedBytes(name, [bytes] * len(BEFORE.operators))


def test_bands_fill_the_room_below_the_original_and_no_more() -> None:
    chart = drawn(AFTER)
    found = freed(chart, BEFORE, AFTER, [evenly(20 * samples.MIB), evenly(2**40, "recompute")], "")
    assert [band.technique for band in found.bands] == ["replay", "recompute"]
    assert found.bands[0].most_bytes == 20 * samples.MIB
    room = [max(a - b, 0) for a, b in zip(found.original, found.planned, strict=True)]
    filled = [sum(column) for column in zip(*(b.values for b in found.bands), strict=True)]
    assert filled == room
    assert max(room) == pytest.approx((412 - 236) * samples.MIB, rel=0.05)


def test_techniques_that_are_not_simulated_have_the_rest() -> None:
    found = freed(drawn(AFTER), BEFORE, AFTER, [evenly(samples.MIB)], "shard")
    assert [band.technique for band in found.bands] == ["replay", "shard"]
    assert found.bands[1].words.startswith("shard frees up to 1")


def test_a_plan_that_was_not_tried_frees_below_the_original() -> None:
    found = predicted(drawn(BEFORE), BEFORE, [evenly(5 * samples.MIB)])
    assert found.original == drawn(BEFORE).totals
    assert [a - b for a, b in zip(found.original, found.planned, strict=True)] == [
        5 * samples.MIB
    ] * len(found.planned)


def chain(*names: tuple[str, Phase]) -> Profile:
    step = Step()
    for name, phase in names:
        step.op(name, makes=100, phase=phase)
    return step.profile()


def test_recomputed_operators_stay_where_the_step_was() -> None:
    before = chain(("aten::relu", "forward"), ("aten::mm", "forward"), ("aten::mm", "backward"))
    after = chain(
        ("aten::relu_", "forward"),
        ("aten::mm", "forward"),
        ("aten::relu", "recompute"),
        ("aten::clone", "backward"),
        ("aten::mm", "backward"),
    )
    assert same_operators(before, after) == [0, 1, 1, 1, 2]
    assert same_operators(before, before) == [0, 1, 2]


def test_the_page_numbers_the_techniques_of_a_real_plan() -> None:
    profile = training_step(device="emulated a100")
    planner = Planner(profile, step_seconds=profile.step_seconds, fingerprint={})
    plan = planner.plan(Budget(int(0.7 * planner.simulated_original)))
    summary = PlanSummary(techniques=plan.techniques, predicted=plan.predicted)
    report = replace(samples.OPTIMIZE, plan=summary, planned=None, certificate=None)
    page = html.render(report, profile, None)
    marks = re.findall(
        r'<b class="mark t-\d" style="left:([\d.]+)%;bottom:([\d.]+)%">(\d)</b>', page
    )
    assert marks
    assert all(0 <= float(left) <= 100 and 0 <= float(up) <= 100 for left, up, _ in marks)
    assert [number for *_, number in marks] == [str(n + 1) for n in range(len(marks))]
    assert f"{plan.techniques[0].name} frees up to" in Page(page).text
