"""What the waits of an emulated step would cost."""

import pytest

from profiles import Step, use
from torchtrim.costs.devices import DEVICES
from torchtrim.costs.syncs import price_syncs
from torchtrim.records.profile import Profile


def step_of(reads: int, *, race: bool = False) -> Profile:
    """A long product, reads of it, and much work for the host."""
    step = Step("emulated")
    weight = step.alive("parameter", 4, device="cuda:0")
    square = use(weight, "float32", (8192, 8192))
    step.op("aten::mm", square, square, mutates=(weight,))
    for number in range(reads):
        read = step.op("aten::_local_scalar_dense", use(weight, "float32", (1,)), line=10 + number)
        step.sync("async-read" if race else "item", read, line=10 + number)
    for _ in range(500):
        step.op("aten::view", square)
    return step.profile()


def test_the_first_of_two_waits_hides_the_second() -> None:
    found = price_syncs(step_of(2), DEVICES["h100"])
    first, second = found.waits
    assert (first.syncs, second.syncs) == ((0,), (1,))
    assert first.wait_ms > 10 > 1000 * second.wait_ms
    assert first.saves_alone_ms is not None
    assert first.saves_alone_ms < 0.1
    assert found.cost.all_saves_ms == pytest.approx(2.5, rel=0.1)
    assert found.cost.sets[0].findings == (0, 1)
    assert found.cost.source == "modelled"


def test_a_slower_device_takes_longer() -> None:
    times = [price_syncs(step_of(1), DEVICES[name]).cost.step_ms for name in ("h100", "a100", "t4")]
    assert times == sorted(times)


def test_sites_are_priced_as_they_are_given() -> None:
    found = price_syncs(step_of(2), DEVICES["h100"], [[0, 1]])
    assert [wait.syncs for wait in found.waits] == [(0, 1)]
    assert found.waits[0].saves_alone_ms == pytest.approx(found.cost.all_saves_ms)


def test_no_waits_and_races() -> None:
    assert price_syncs(step_of(0), DEVICES["l4"]).waits == ()
    assert price_syncs(step_of(2, race=True), DEVICES["l4"]).waits == ()


def test_a_wait_of_no_operator_and_an_empty_step() -> None:
    step = Step("emulated")
    weight = step.alive("parameter", 4, device="cuda:0")
    square = use(weight, "float32", (8192, 8192))
    step.op("aten::mm", square, square, mutates=(weight,), phase="forward")
    step.sync("synchronize", line=4)
    found = price_syncs(step.profile(), DEVICES["h100"])
    assert found.waits[0].wait_ms > 10
    assert price_syncs(Step("emulated").profile(), DEVICES["h100"]).cost.step_ms == 0
