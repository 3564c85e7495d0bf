"""The lanes of a step: the times that its waits were priced with, as columns."""

from array import array

import pytest

from profiles import Step
from torchtrim.costs.devices import DEVICES
from torchtrim.costs.syncs import price_syncs
from torchtrim.records.profile import Profile
from torchtrim.records.report import Waiting
from torchtrim.report.lanes import LaneSpan, Spans, lanes


def waiting(device: str) -> Waiting:
    return Waiting(
        device=device,
        source="modelled",
        step_ms=1.0,
        device_busy_ms=1.0,
        bound="waits",
        all_saves_ms=0.0,
    )


def reads(races: bool = False) -> Profile:
    step = Step("emulated")
    weight = step.alive("parameter", 4 * 2**20)
    step.sync("synchronize", line=1)
    for number in range(30):
        made = step.op("aten::mul", weight, makes=2**number, line=number)
        if number % 7 == 0:
            step.sync("async-read" if races else "item", made)
            step.sync("item", made)
    return step.profile()


def test_columns_read_as_spans() -> None:
    spans = Spans(array("d", [0.0, 1.0, 4.0]), array("d", [1.0, 2.0, 0.5]), [7, 8, 9], "abc")
    assert list(spans) == [
        LaneSpan(0.0, 1.0, 7, "a"),
        LaneSpan(1.0, 2.0, 8, "b"),
        LaneSpan(4.0, 0.5, 9, "c"),
    ]
    assert spans[-1] == list(spans)[-1]
    assert spans[1:] == list(spans)[1:]
    assert len(spans) == 3
    with pytest.raises(IndexError):
        spans[3]
    assert [one.index for one in Spans(array("d", [0.0, 1.0]), array("d", [1.0, 1.0]))] == [0, 1]


@pytest.mark.parametrize("races", [False, True])
@pytest.mark.parametrize("device", ["a100", "t4"])
def test_the_waits_of_the_lanes_are_those_that_were_priced(device: str, races: bool) -> None:
    profile = reads(races)
    priced = price_syncs(profile, DEVICES[device])
    drawn = lanes(waiting(device), profile)
    assert 1e3 * drawn.seconds == pytest.approx(priced.step_ms)
    stood = 1e3 * sum(span.seconds for span in drawn.waits)
    assert stood == pytest.approx(sum(wait.wait_ms for wait in priced.waits))
    assert {span.name for span in drawn.waits} == {"item", "synchronize"}
    starts = [span.start for span in drawn.device]
    assert starts == sorted(starts)


def test_a_device_that_is_not_known_is_drawn_as_it_was_recorded() -> None:
    drawn = lanes(waiting("abacus"), reads())
    assert (drawn.source, drawn.device_name, list(drawn.device)) == ("measured", "", [])
    assert len(drawn.host) == len(reads().operators)


def test_a_step_without_operators_has_no_lanes() -> None:
    drawn = lanes(waiting("a100"), Step("emulated").profile())
    assert drawn.seconds == 0
    assert drawn.memory == []
