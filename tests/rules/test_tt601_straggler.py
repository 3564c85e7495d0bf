import pytest

from profiles import Step
from torchtrim.records.profile import Profile
from torchtrim.rules.tt601_straggler import across


def rank(number: int, extra: float = 0.0, waits: float = 0.0, under_way: float = 0.1) -> Profile:
    """A second of work, of which one line takes longer, and an exchange that is waited for."""
    step = Step()
    step.op("aten::mm", seconds=0.5, line=3)
    step.op("aten::mm", seconds=0.5 + extra, line=4)
    if waits:
        step.wait(waits)
    step.exchange(400, under_way, line=5)
    step.idle(under_way)
    step.op("aten::add_", seconds=0.1, phase="optimizer", line=6)
    return step.profile(seconds=1.2 + extra, rank=number)


def test_the_other_ranks_wait() -> None:
    (finding,) = across([rank(0, under_way=0.6), rank(1, extra=0.5)])
    assert (finding.code, finding.path, finding.line) == ("TT601", "train.py", 4)
    assert finding.price_ms == pytest.approx(500)
    assert finding.message == (
        "the other ranks wait 500 ms of 1.70 s (29%) for rank 1, which arrives last"
    )


def test_the_ranks_come_together() -> None:
    assert not [*across([rank(0), rank(1)])]


@pytest.mark.parametrize(("extra", "found"), [(0.2, 0), (0.35, 1)])
def test_a_fifth_of_the_step_is_the_border(extra: float, found: int) -> None:
    ranks = [rank(0, under_way=0.1 + extra), rank(1, extra=extra)]
    assert len([*across(ranks)]) == found


def test_a_rank_that_waited_for_its_data_is_no_straggler() -> None:
    assert not [*across([rank(0, under_way=0.6), rank(1, extra=0.5, waits=0.5)])]


def test_one_rank_alone_waits_for_nobody() -> None:
    assert not [*across([rank(0)])]


def test_ranks_that_do_not_do_the_same_have_no_line() -> None:
    step = Step()
    step.op("aten::mm", seconds=1.5, line=9)
    step.exchange(400, 0.1)
    (finding,) = across([rank(0, under_way=0.6), step.profile(seconds=1.7, rank=1)])
    assert (finding.path, finding.line) == ("train.py", 0)
