import pytest

from profiles import Step
from torchtrim.records.profile import Profile
from torchtrim.rules.tt606_loader_of_another import across


def rank(number: int, late: float = 0.0, waits: float = 0.0, under_way: float = 0.1) -> Profile:
    """A rank that is late, and waited so long for its data."""
    step = Step()
    step.idle(late)
    if waits:
        step.wait(waits)
    step.op("aten::mm", seconds=1.0, line=3)
    step.exchange(400, under_way)
    step.idle(under_way)
    step.op("aten::add_", seconds=0.1, phase="optimizer")
    return step.profile(seconds=1.2 + late, rank=number)


def test_a_loader_that_the_others_wait_for() -> None:
    (finding,) = across([rank(0, under_way=0.6), rank(1, late=0.5, waits=0.5)])
    assert (finding.code, finding.path, finding.line) == ("TT606", "train.py", 0)
    assert finding.price_ms == pytest.approx(500)
    assert "for the data loader of rank 1" in finding.message


def test_loaders_that_are_all_slow_hold_up_no_other_rank() -> None:
    assert not [*across([rank(0, late=0.5, waits=0.5), rank(1, late=0.5, waits=0.5)])]


def test_a_rank_that_is_late_for_another_reason() -> None:
    assert not [*across([rank(0, under_way=0.6), rank(1, late=0.5, waits=0.1)])]


def test_one_rank_alone_waits_for_nobody() -> None:
    assert not [*across([rank(0, waits=0.5)])]
