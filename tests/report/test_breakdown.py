import pytest
from msgspec.structs import replace

from profiles import Step, training_step
from report import samples
from torchtrim.costs.devices import DEVICES
from torchtrim.costs.syncs import price_syncs
from torchtrim.records.report import WaitCost
from torchtrim.report.breakdown import count, operator_table, splits, tree
from torchtrim.report.lanes import lanes

REPORT = replace(samples.DIAGNOSE, original=None)


def waiting(step: float, busy: float, saves: float) -> WaitCost:
    return WaitCost(
        device="a100",
        source="modelled",
        step_ms=step,
        device_busy_ms=busy,
        bound="waits",
        all_saves_ms=saves,
    )


def test_loader_operators_inside_a_wait_are_counted_once() -> None:
    step = Step()
    step.op("aten::stack", phase="loader", seconds=0.2)
    step.op("aten::mm", seconds=0.3)
    step.op("c10d::allreduce_", seconds=0.1)
    step.wait(0.25)
    profile = step.profile(seconds=1.0)
    (found,) = splits(REPORT, profile)
    parts = {part.kind: part.seconds for part in found.parts}
    assert parts == pytest.approx(
        {"loader": 0.25, "forward": 0.3, "communication": 0.1, "host": 0.35}
    )
    assert found.seconds == pytest.approx(1.0)


def test_what_a_model_says_adds_up_and_comes_first() -> None:
    report = replace(REPORT, waiting=waiting(10, 6, 9))
    found = splits(report, training_step(device="emulated"))
    assert [one.source for one in found] == ["modelled", "measured"]
    assert {p.kind: p.share for p in found[0].parts} == pytest.approx({"device": 60, "waiting": 40})


def test_without_a_profile_and_without_waits_there_is_nothing() -> None:
    assert splits(REPORT, None) == []


def test_the_modelled_lanes_take_as_long_as_the_model_says() -> None:
    step = Step("emulated")
    weight = step.alive("parameter", 4 * 2**20)
    for number in range(12):
        made = step.op("aten::mul", weight, makes=4 * 2**20)
        if number % 4 == 3:
            step.sync("item", made)
    profile = step.profile()
    model = price_syncs(profile, DEVICES["a100"]).cost
    report = replace(REPORT, waiting=waiting(model.step_ms, model.device_busy_ms, 0.0))
    drawn = lanes(report.waiting, profile)
    assert drawn.source == "modelled"
    assert 1e3 * drawn.seconds == pytest.approx(model.step_ms, rel=0.01)
    assert 1e3 * sum(s.seconds for s in drawn.device) == pytest.approx(model.device_busy_ms)
    assert len(drawn.waits) == 3


def test_modules_lie_in_each_other_and_operators_of_a_line_are_one_row() -> None:
    profile = training_step(blocks=3)
    drawn = lanes(None, profile)
    assert [profile.modules[span.index].path for span in drawn.modules[0]][:1] == ["net"]
    assert [profile.modules[s.index].path for s in drawn.modules[1]] == ["net.0", "net.1", "net.2"]
    table = operator_table(profile, drawn, 2, source=True)
    assert sum(row.count for row in table.rows) <= len(profile.operators)
    assert table.dropped > 0
    assert table.dropped_share + sum(row.share for row in table.rows) == pytest.approx(100)
    assert all(not r.place for r in operator_table(profile, drawn, 9, source=False).rows)


def test_bytes_of_a_module_are_with_its_parents_and_add_up() -> None:
    step = Step()
    weight = step.alive("parameter", 1000, name="net.block.0.weight")
    batch = step.alive("input", 500)
    with step.module("net", "Net"), step.module("net.block", "Block"):
        with step.module("net.block.0", "Linear"):
            first = step.op("aten::mm", weight, batch, makes=3000)
        with step.module("net.block.1", "Linear"):
            step.op("aten::mm", first, makes=4000)
    found = tree(step.profile())
    assert [(node.name, node.bytes) for node in found] == [("net", 8000), ("outside modules", 500)]
    (block,) = found[0].children
    assert [(node.name, node.bytes) for node in block.children] == [("0", 4000), ("1", 4000)]
    assert sum(node.share for node in found) == 100


def test_many_small_modules_are_summed() -> None:
    step = Step()
    for number in range(500):
        step.alive("parameter", 10, name=f"net.{number}.weight")
        step.declare(f"net.{number}")
    step.declare("net")
    step.op("aten::mm", makes=8)
    found = tree(step.profile())
    assert count(found) < 30
    assert found[0].children[-1].name == "500 others"
    assert found[0].bytes == 5000
