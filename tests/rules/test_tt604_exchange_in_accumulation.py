import pytest

from profiles import Step
from torchtrim.records.profile import OptimizerStep, Profile, Update
from torchtrim.rules.tt604_exchange_in_accumulation import across


def step_of(micro_batches: int, exchanges: int, added: int | None = None) -> Profile:
    """Micro-batches whose gradients, of 400 bytes, are exchanged after the last so many of them."""
    step = Step()
    weight = step.alive("parameter", 400, name="Net.weight")
    gradient = step.alive("gradient", 400)
    for number in range(micro_batches):
        with step.module("Net", "DistributedDataParallel"):
            out = step.op("aten::mm", weight, makes=100, line=7)
        step.backward("aten::mm", out, weight)
        if number >= micro_batches - exchanges:
            step.exchange(400, 0.05)
            step.idle(0.05)
    step.replica(400)
    times = micro_batches if added is None else added
    update = Update(weight, gradient, (), 0, len(step.operators), times)
    last = len(step.operators)
    step.optimizer_steps.append(
        OptimizerStep("SGD", "torch.optim.SGD", last, last, (update,), False)
    )
    return step.profile()


def test_an_exchange_for_each_micro_batch() -> None:
    (finding,) = across([step_of(4, 4)])
    assert (finding.code, finding.line, finding.count_per_step) == ("TT604", 7, 3)
    assert finding.price_ms == pytest.approx(150)
    assert "1.56 KiB of gradients in 4 rounds" in finding.message
    assert finding.fix is not None
    assert finding.fix.equivalence == "ROUNDING"


@pytest.mark.parametrize("micro_batches", [1, 4])
def test_one_exchange_a_step_is_as_it_should_be(micro_batches: int) -> None:
    assert not [*across([step_of(micro_batches, 1)])]


def test_gradients_that_are_not_added_up_are_exchanged_each() -> None:
    assert not [*across([step_of(2, 2, added=1)])]


def test_several_ranks_are_told_of_once() -> None:
    assert len([*across([step_of(2, 2), step_of(2, 2)])]) == 1


def test_without_replicas_nothing_is_known() -> None:
    step = Step()
    step.op("aten::mm")
    assert not [*across([step.profile()])]
