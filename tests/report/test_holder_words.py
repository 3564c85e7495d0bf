"""Rows of the peak, and other budgets, in words."""

from __future__ import annotations

from io import StringIO

import msgspec
import pytest
from rich.console import Console

from report import samples
from torchtrim.records.report import FrontierPoint, Holder
from torchtrim.report import terminal
from torchtrim.report.frontier import frontier_shown, on_device, way_of
from torchtrim.report.holder_words import owner_of, reason_of
from torchtrim.report.safe import without_source

HOLDER = Holder(
    bytes=2**20,
    count=2,
    kind="activation",
    module="Net.stage1.*.1",
    path="/home/ana/train.py",
    line=20,
    why="saved by ReLU for backward",
    type="BatchNorm2d",
    made_path="/home/ana/train.py",
    made_line=9,
    what="normalized input",
)


def test_a_row_names_class_constructor_call_and_reason() -> None:
    assert owner_of(HOLDER, "/home/ana") == "Net.stage1.*.1 BatchNorm2d, made at train.py:9"
    reason = "train.py:20: normalized input, saved by ReLU for backward"
    assert reason_of(HOLDER, "/home/ana") == reason


def test_what_is_not_known_leaves_no_gap() -> None:
    bare = Holder(bytes=1, count=1, kind="optimizer_state", module="", path="", line=0, why="")
    assert (owner_of(bare), reason_of(bare)) == ("optimizer state", "optimizer state")
    old = msgspec.structs.replace(HOLDER, type="", made_path="", made_line=0, what="")
    assert owner_of(old) == "Net.stage1.*.1"
    assert reason_of(old, "/home/ana") == "train.py:20: saved by ReLU for backward"
    root = msgspec.structs.replace(old, module="Net#2", type="Net")
    assert owner_of(root) == "Net#2"


@pytest.mark.parametrize("width", [40, 80, 160])
def test_nothing_of_a_row_is_lost_where_all_is_shown(width: int) -> None:
    report = msgspec.structs.replace(
        samples.DIAGNOSE, holders=(HOLDER, HOLDER), project="/home/ana"
    )
    out = StringIO()
    console = Console(file=out, width=width)
    terminal.render(report, console, next_command=None, amount="all")
    joined = "".join(out.getvalue().split())
    for words in (owner_of(HOLDER, "/home/ana"), reason_of(HOLDER, "/home/ana")):
        assert "".join(words.split()) in joined
    assert max(map(len, out.getvalue().splitlines())) <= width


def test_without_source_no_row_has_a_line() -> None:
    report = msgspec.structs.replace(samples.DIAGNOSE, holders=(HOLDER,))
    (bare,) = without_source(report).holders
    assert (bare.made_path, bare.made_line, bare.path) == ("", 0, "")


def point(budget: int, by_hand: str = "", device: str = "a100") -> FrontierPoint:
    return FrontierPoint(
        budget_bytes=budget,
        peak_bytes=budget,
        step_seconds=1.0,
        where=(),
        by_hand=by_hand,
        device=device,
        techniques={"overwrite": 7, "replay": 1} if not by_hand else {},
    )


def test_rows_of_other_budgets_are_spread_and_keep_their_order() -> None:
    points = [point(9), point(8), point(7, "by hand"), *map(point, (6, 5, 4))]
    shown = [one.budget_bytes for one in frontier_shown(points, 3)]
    assert shown == [9, 7, 6, 4]
    assert frontier_shown(points, 9) == points
    assert [one.budget_bytes for one in frontier_shown(points, 1)] == [9, 7]


def test_a_budget_says_how_and_whose_time() -> None:
    assert way_of(point(1)) == "overwrite x7, replay x1"
    assert way_of(point(1, "two halves")) == "two halves"
    assert way_of(msgspec.structs.replace(point(1), techniques={})) == "unchanged"
    assert on_device([point(1)]) == " on A100, modelled"
    assert on_device([point(1, device="")]) == ""
