import pytest

from profiles import Step, exchanging_step
from torchtrim.records.profile import Profile
from torchtrim.rules.tt602_exposed_communication import across


def rank(number: int, under_way: float, beside: float = 0.0, device: str = "cpu") -> Profile:
    """A second of work, then an exchange, with some work beside it."""
    step = Step(device)
    step.op("aten::mm", seconds=1.0, line=3)
    step.exchange(2048, under_way, line=4)
    step.op("aten::mm", seconds=beside, phase="backward", line=5)
    step.idle(max(under_way - beside, 0.0))
    step.op("aten::add_", seconds=0.0, phase="optimizer", line=6)
    return step.profile(seconds=1.0 + max(under_way, beside), rank=number)


def test_what_nothing_hides_is_found() -> None:
    (finding,) = across([rank(0, 0.3), rank(1, 0.3)])
    assert (finding.code, finding.line, finding.count_per_step) == ("TT602", 4, 1)
    assert finding.price_ms == pytest.approx(300)
    assert finding.message == (
        "rank 1 waits 300 ms of 1.30 s (23%) for 1 collective of 2.00 KiB when it has nothing else to do"
    )


def test_what_each_way_to_exchange_brings_is_said() -> None:
    """1.2 s an exchange and 0.1 s a MiB: one bucket of 16 MiB is best, and half of its bytes better."""
    exchanges = [(2**20, 1.3), (15 * 2**20, 2.7)]
    (finding,) = across([exchanging_step(exchanges, rank) for rank in range(2)])
    assert finding.fix is not None
    assert "bfloat16 takes 800 ms less" in finding.fix.reason
    assert "bucket_cap_mb" not in finding.fix.reason


def test_what_is_hidden_behind_backward_is_not() -> None:
    assert not [*across([rank(0, 0.25, beside=0.3), rank(1, 0.25, beside=0.3)])]


def test_a_wait_for_a_later_rank_is_another_finding() -> None:
    late = Step()
    late.op("aten::mm", seconds=1.5, line=3)
    late.exchange(2048, 0.01, line=4)
    assert not [*across([rank(0, 0.51), late.profile(seconds=1.51, rank=1)])]


def test_one_rank_and_an_emulated_device_say_nothing() -> None:
    assert not [*across([rank(0, 0.25)])]
    assert not [*across([rank(0, 0.25, device="emulated"), rank(1, 0.25, device="emulated")])]
