import pytest

from profiles import Step, training_step
from torchtrim.records.profile import Kind
from torchtrim.rules.tt201_peak_tensor import check


def test_an_activation_that_owns_the_peak() -> None:
    step = Step()
    step.alive("parameter", 2000, name="net.weight")
    with step.module("net.head", "Linear"):
        logits = step.op("aten::addmm", makes=6 * 1024, line=42)
    loss = step.op("aten::nll_loss", logits, makes=4)
    step.backward("aten::nll_loss_backward", loss, logits)
    (finding,) = check(step.profile())
    assert (finding.code, finding.path, finding.line) == ("TT201", "train.py", 42)
    assert finding.message == (
        "one activation of 6.00 KiB is 75% of the peak: created by matmul in net.head, "
        "saved by NLL loss for backward"
    )
    assert finding.price_bytes == 6 * 1024


@pytest.mark.parametrize(("size", "count"), [(199, 0), (200, 1), (201, 1)])
def test_a_fifth_of_the_peak_is_the_border(size: int, count: int) -> None:
    step = Step()
    step.alive("parameter", 1000 - size)
    step.op("aten::relu", makes=size)
    assert len(list(check(step.profile()))) == count


@pytest.mark.parametrize("kind", ["parameter", "buffer", "optimizer_state"])
def test_what_is_always_alive_is_left_out(kind: Kind) -> None:
    step = Step()
    step.alive(kind, 1000)
    step.op("aten::relu", makes=10)
    assert not list(check(step.profile()))


@pytest.mark.parametrize("kind", ["input", "gradient", "temporary"])
def test_what_comes_from_before_the_step_points_at_the_script(kind: Kind) -> None:
    step = Step()
    step.alive(kind, 1000)
    step.op("aten::relu", makes=10, line=3)
    (finding,) = check(step.profile())
    assert (finding.path, finding.line) == ("train.py", 0)
    assert "from before the step" in finding.message


def test_a_large_tensor_away_from_the_peak_is_left_out() -> None:
    step = Step()
    large = step.op("aten::relu", makes=900)
    step.free(large)
    for _ in range(10):
        step.op("aten::relu", makes=100)
    assert not list(check(step.profile()))


def test_the_price_is_what_the_peak_would_fall_by() -> None:
    step = Step()
    large = step.op("aten::relu", makes=1000)
    step.free(large)
    step.op("aten::sum", makes=(180,) * 5)
    (finding,) = check(step.profile())
    assert finding.price_bytes == 100


def test_a_reference_that_is_still_held_is_to_be_deleted() -> None:
    step = Step()
    with step.module("net"):
        step.op("aten::addmm", makes=1000)
    step.op("aten::mm", makes=1, phase="backward")
    (finding,) = check(step.profile())
    assert finding.fix is not None
    assert finding.fix.reason.startswith("del ")


def test_a_chain_of_equal_blocks_has_no_owner() -> None:
    assert not list(check(training_step(blocks=8)))


def test_a_step_without_operators_or_bytes() -> None:
    assert not list(check(Step().profile()))
    step = Step()
    step.op("aten::relu", makes=0)
    assert not list(check(step.profile()))
