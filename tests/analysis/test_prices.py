"""Waits of an emulated step are priced on the device that it stands for, alone and together."""

import pytest

from profiles import Step, use
from torchtrim.analysis.prices import priced
from torchtrim.records.finding import Finding
from torchtrim.records.profile import Profile
from torchtrim.rules.registry import diagnose


def two_reads(device: str) -> Profile:
    """A long product, a read of it on each of two lines, and much work for the host after them."""
    step = Step(device)
    weight = step.alive("parameter", 4)
    square = use(weight, "float32", (8192, 8192))
    step.op("aten::mm", square, square, mutates=(weight,), line=1)
    for line in (2, 3):
        read = step.op("aten::_local_scalar_dense", use(weight, "float32", (1,)), line=line)
        step.sync("item", read)
    for _ in range(500):
        step.op("aten::view", square, line=4)
    return step.profile()


def test_a_real_step_is_not_modelled() -> None:
    profile = two_reads("cuda:0")
    assert priced(profile, diagnose(profile)) == (diagnose(profile), None)


def test_a_step_without_waits_is_not_modelled() -> None:
    profile = Step("emulated").profile()
    assert priced(profile, ()) == ((), None)


def test_alone_the_wait_moves_and_together_it_goes() -> None:
    profile = two_reads("emulated h100")
    findings, waiting = priced(profile, diagnose(profile, ["TT1"]))
    assert waiting is not None
    assert waiting.device == "h100"
    alone = [finding.price_ms for finding in findings]
    assert all(price is not None and price < 0.1 for price in alone)
    assert waiting.all_saves_ms > 2
    assert waiting.sets[0].findings == (0, 1)
    assert waiting.sets[0].saves_ms == pytest.approx(waiting.all_saves_ms)
    assert {finding.source for finding in findings} == {"modelled"}
    assert any("removing it alone gains nothing" in finding.message for finding in findings)


def test_where_no_device_is_named_it_is_an_a100() -> None:
    profile = two_reads("emulated")
    _, waiting = priced(profile, diagnose(profile))
    assert waiting is not None
    assert waiting.device == "a100"


def test_sets_name_findings_in_their_new_order() -> None:
    profile = two_reads("emulated t4")
    findings, waiting = priced(profile, reversed(diagnose(profile)))
    assert waiting is not None
    for chosen in waiting.sets:
        assert all(findings[number].code == "TT101" for number in chosen.findings)


def test_a_loader_at_a_fifth_of_the_step_comes_before_waits_of_microseconds() -> None:
    profile = two_reads("emulated h100")
    loader = Finding(
        code="TT301",
        path="train.py",
        line=9,
        end_line=9,
        message="the step waits for its loader",
        count_per_step=1,
        price_ms=220 * profile.step_seconds,
    )
    findings, waiting = priced(profile, (*diagnose(profile, ["TT1"]), loader))
    assert findings[0] == loader
    assert waiting is not None
    assert waiting.sets[0].findings == (1, 2)


def test_a_wait_for_next_to_nothing_is_said_to_be_little() -> None:
    step = Step("emulated h100")
    weight = step.alive("parameter", 4)
    square = use(weight, "float32", (8192, 8192))
    read = step.op("aten::_local_scalar_dense", use(weight, "float32", (1,)), line=1)
    step.sync("item", read)
    for _ in range(20):
        step.op("aten::mm", square, square, mutates=(weight,), line=2)
    profile = step.profile()
    (finding,), waiting = priced(profile, diagnose(profile, ["TT1"]))
    assert waiting is not None
    assert waiting.all_saves_ms < 0.003 * waiting.step_ms
    assert finding.message.endswith("less than 0.3 % of the step")
