import pytest
from msgspec.structs import replace

from profiles import SCRIPT, Step
from torchtrim.analysis.syncs import unknown_note, unknown_operators
from torchtrim.rules.tt101_host_read import RULE


def one_read(device: str, seconds: float | None = None) -> Step:
    step = Step(device)
    loss = step.alive("temporary", 4)
    read = step.op("aten::_local_scalar_dense", loss, line=12)
    step.sync("item", read, seconds=seconds)
    return step


def test_a_read_is_found_at_its_line() -> None:
    (finding,) = RULE.check(one_read("cuda:0").profile())
    assert (finding.code, finding.path, finding.line) == ("TT101", "train.py", 12)
    assert finding.count_per_step == 1
    assert finding.message.startswith("a tensor's value is read on the host once a step (item)")


def test_a_real_device_measures_the_price() -> None:
    (finding,) = RULE.check(one_read("cuda:0", seconds=0.005).profile())
    assert finding.price_ms == pytest.approx(5)
    assert finding.source == "measured"
    assert "5 ms" in finding.message


def test_an_emulated_device_has_no_measured_price() -> None:
    (finding,) = RULE.check(one_read("emulated").profile())
    assert finding.price_ms is None
    assert finding.source == "modelled"
    assert " ms" not in finding.message


def test_operators_that_did_not_wait_are_no_finding() -> None:
    step = Step("cuda:0")
    step.op("aten::_local_scalar_dense", step.alive("input", 4, device="cpu"), line=3)
    assert not list(RULE.check(step.profile()))


def test_waits_of_other_kinds_are_left_to_other_rules() -> None:
    step = Step("cuda:0")
    step.sync("nonzero", step.op("aten::nonzero", step.alive("input", 4), line=3))
    assert not list(RULE.check(step.profile()))


def test_reads_are_counted_by_line() -> None:
    step = Step("cuda:0")
    loss = step.alive("temporary", 4)
    for line in (3, 4, 3, 3):
        step.sync("item", step.op("aten::_local_scalar_dense", loss, line=line), seconds=0.001)
    found = {f.line: f for f in RULE.check(step.profile())}
    assert {line: f.count_per_step for line, f in found.items()} == {3: 3, 4: 1}
    assert found[3].price_ms == pytest.approx(3)
    assert "3 times a step" in found[3].message


def test_without_a_place_the_script_is_named() -> None:
    step = Step("cuda:0")
    step.sync("item", step.op("aten::_local_scalar_dense", step.alive("temporary", 4)))
    (finding,) = RULE.check(step.profile())
    assert (finding.path, finding.line, finding.end_line) == ("train.py", 0, 0)


def test_a_read_by_the_optimizer_has_its_own_advice() -> None:
    step = Step("cuda:0")
    state = step.alive("optimizer_state", 4)
    step.sync("item", step.op("aten::_local_scalar_dense", state, phase="optimizer", line=1))
    step.sync("item", step.op("aten::_local_scalar_dense", state, line=2))
    first, second = RULE.check(step.profile())
    assert first.fix is not None
    assert second.fix is not None
    assert "fused=True" in first.fix.reason
    assert "fused=True" not in second.fix.reason


def test_a_wait_in_backward_is_at_the_line_of_its_forward() -> None:
    step = Step("cuda:0")
    picked = step.op("aten::index.Tensor", step.alive("input", 16), line=7)
    step.sync("item", step.op("aten::_local_scalar_dense", phase="backward", forward=picked.index))
    (finding,) = RULE.check(step.profile())
    assert finding.line == 7
    assert "in backward" in finding.message


def test_lines_inside_a_library_stand_beside_the_users_own() -> None:
    step = Step("cuda:0")
    loss = step.alive("temporary", 4)
    for line, many in ((471, 3), (33, 1)):
        for _ in range(many):
            read = step.op(
                "aten::_local_scalar_dense", loss, line=line, path="/lib/trainer/loop.py"
            )
            place = step._place(SCRIPT, 7)
            step.operators[read.index] = replace(step.operators[read.index], caller=place)
            step.sync("item", read)
    (finding,) = RULE.check(step.profile())
    assert (finding.path, finding.line) == ("train.py", 7)
    assert "inside trainer/loop.py:471 in " in finding.message
    assert "(3 times), trainer/loop.py:33 in " in finding.message


def test_operators_that_nobody_read_are_said_to_be_unknown() -> None:
    step = Step("cuda:0")
    boxes = step.alive("input", 64)
    for name in (
        "torchvision::nms",
        "torchvision::roi_align",
        "aten::add",
        "xformers::mha.default",
    ):
        step.op(name, boxes, makes=64)
    step.op("mylib::host", step.alive("input", 4, device="cpu"))
    assert dict(unknown_operators(step.profile())) == {"xformers::mha": 1}
    assert "xformers::mha (once)" in unknown_note(step.profile())
    assert unknown_note(Step("cuda:0").profile()) == ""
