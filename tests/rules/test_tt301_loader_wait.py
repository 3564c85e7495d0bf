import pytest

from profiles import Step
from torchtrim.records.finding import Finding
from torchtrim.rules.tt301_loader_wait import check


def found(waited: float, workers: int = 0, device: str = "cpu") -> list[Finding]:
    """A step of one second, of which it waited some in two waits."""
    step = Step(device)
    step.op("aten::addmm")
    step.wait(waited / 2, workers)
    step.wait(waited / 2, workers)
    return list(check(step.profile(seconds=1.0)))


@pytest.mark.parametrize(("waited", "count"), [(0.0, 0), (0.19, 0), (0.2, 1), (0.9, 1)])
def test_a_fifth_of_the_step_is_the_border(waited: float, count: int) -> None:
    assert len(found(waited)) == count


def test_the_price_is_the_time_waited() -> None:
    (finding,) = found(0.4)
    assert finding.price_ms == pytest.approx(400)
    assert finding.count_per_step == 2
    assert (finding.code, finding.path, finding.line) == ("TT301", "train.py", 0)
    assert finding.message == (
        "the step waits 400 ms of 1.00 s (40%) for its data loader, which has 0 workers"
    )


@pytest.mark.parametrize(("waited", "workers"), [(0.4, 1), (0.5, 1), (0.75, 3), (0.999, 8)])
def test_without_workers_as_many_as_the_computing_hides(waited: float, workers: int) -> None:
    (finding,) = found(waited)
    assert finding.fix is not None
    assert f"num_workers={workers}," in finding.fix.reason


def test_with_workers_more_or_cheaper_samples() -> None:
    (finding,) = found(0.5, workers=2)
    assert finding.fix is not None
    assert "more than num_workers=2" in finding.fix.reason
    assert "cheaper" in finding.fix.reason


@pytest.mark.parametrize(("device", "pinned"), [("cpu", False), ("cuda:0", True)])
def test_pinned_memory_is_for_a_device(device: str, pinned: bool) -> None:
    (finding,) = found(0.5, device=device)
    assert finding.fix is not None
    assert ("pin_memory" in finding.fix.reason) is pinned


def test_a_step_that_took_no_time() -> None:
    step = Step()
    step.wait(0.0)
    assert not list(check(step.profile(seconds=0.0)))
