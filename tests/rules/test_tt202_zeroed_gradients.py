import pytest

from profiles import Step
from torchtrim.rules.tt202_zeroed_gradients import check

SIZE = 1024


def step_that_zeroes(*, before_forward: bool, name: str = "aten::zero_", reached: int = 2) -> Step:
    """Two parameters with gradients; backward adds to the first `reached`."""
    step = Step()
    gradients = [step.alive("gradient", SIZE, name=f"net.{i}.weight") for i in range(2)]

    def zero() -> None:
        for gradient in gradients:
            step.op(name, gradient, mutates=(gradient,), phase="other", line=3)

    if before_forward:
        zero()
    out = step.op("aten::addmm", makes=8 * SIZE, line=4)
    step.backward("aten::mm", out, out)
    step.free(out)
    for gradient in gradients[:reached]:
        step.op("aten::add_", gradient, mutates=(gradient,), phase="backward")
    for gradient in gradients:
        step.op("aten::sub_", gradient, phase="optimizer")
    if not before_forward:
        zero()
    return step


def test_zeroed_before_forward() -> None:
    (finding,) = check(step_that_zeroes(before_forward=True).profile())
    assert (finding.code, finding.path, finding.line) == ("TT202", "train.py", 3)
    assert (finding.count_per_step, finding.price_bytes) == (2, 2 * SIZE)
    assert finding.message == (
        "2 gradients (2.00 KiB) are filled with zeros instead of dropped; "
        "2.00 KiB of them are still zero at the peak"
    )


def test_zeroed_after_the_optimizer() -> None:
    (finding,) = check(step_that_zeroes(before_forward=False).profile())
    assert (finding.line, finding.price_bytes) == (3, 2 * SIZE)


def test_zeroed_together() -> None:
    step = step_that_zeroes(before_forward=True, name="aten::_foreach_zero_")
    (finding,) = check(step.profile())
    assert finding.price_bytes == 2 * SIZE


def test_dropped_gradients_are_fine() -> None:
    step = Step()
    out = step.op("aten::addmm", makes=8 * SIZE)
    step.op("aten::mm", out, makes=SIZE, kind="gradient", phase="backward")
    assert not list(check(step.profile()))


def test_gradients_kept_between_micro_batches_are_fine() -> None:
    step = Step()
    gradient = step.alive("gradient", SIZE)
    for _ in range(3):
        out = step.op("aten::addmm", makes=8 * SIZE)
        step.op("aten::add_", gradient, out, mutates=(gradient,), phase="backward")
        step.free(out)
    assert not list(check(step.profile()))


def test_micro_batches_count_only_until_the_first_adds() -> None:
    step = Step()
    gradient = step.alive("gradient", SIZE)
    step.op("aten::zero_", gradient, mutates=(gradient,), phase="other", line=2)
    for size in (4 * SIZE, 8 * SIZE):
        out = step.op("aten::addmm", makes=size)
        step.op("aten::add_", gradient, out, mutates=(gradient,), phase="backward")
        step.free(out)
    (finding,) = check(step.profile())
    assert finding.price_bytes == 0
    assert "0 B of them" in finding.message


def test_zeroed_and_used_outside_forward_and_peak_is_left_out() -> None:
    step = Step()
    gradient = step.alive("gradient", SIZE)
    out = step.op("aten::addmm", makes=8 * SIZE)
    step.free(out)
    step.op("aten::zero_", gradient, mutates=(gradient,), phase="other")
    step.op("aten::add_", gradient, mutates=(gradient,), phase="backward")
    assert not list(check(step.profile()))


def test_equal_but_for_the_sign_of_zeros_where_backward_reaches_all() -> None:
    (finding,) = check(step_that_zeroes(before_forward=True).profile())
    assert finding.fix is not None
    assert finding.fix.equivalence == "ROUNDING"


def test_another_function_where_backward_misses_a_parameter() -> None:
    (finding,) = check(step_that_zeroes(before_forward=True, reached=1).profile())
    assert finding.fix is not None
    assert finding.fix.equivalence == "SEMANTIC"
    assert "1 gradient got nothing" in finding.fix.reason


@pytest.mark.parametrize(("peak_at", "count"), [(0, 1), (1, 1), (2, 0)])
def test_at_the_peak_from_the_zeroing_to_the_adding(peak_at: int, count: int) -> None:
    step = Step()
    gradient = step.alive("gradient", SIZE)
    for index, name in enumerate(("aten::zero_", "aten::add_", "aten::sub_")):
        transient = 8 * SIZE if index == peak_at else 0
        mutates = (gradient,) if index < 2 else ()
        step.op(name, gradient, mutates=mutates, phase="other", transient=transient)
    found = list(check(step.profile()))
    assert [f.price_bytes for f in found] == [SIZE] * count
