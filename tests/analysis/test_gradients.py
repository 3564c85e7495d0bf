from profiles import Step
from torchtrim.analysis.gradients import Zeroed, zeroed_gradients


def accumulating(step: Step, gradient: int) -> int:
    return step.op("aten::add_.Tensor", gradient, mutates=(gradient,), phase="backward").index


def zeroing(step: Step, *gradients: int, name: str = "aten::zero_") -> int:
    return step.op(name, *gradients, mutates=gradients, phase="other").index


def test_zero_from_the_zeroing_until_backward_adds() -> None:
    step = Step()
    gradient = step.alive("gradient", 8)
    by = zeroing(step, gradient)
    step.op("aten::addmm")
    added = accumulating(step, gradient)
    step.op("aten::sgd", phase="optimizer")
    assert zeroed_gradients(step.profile()) == [Zeroed(gradient, by, by, added + 1, True)]


def test_zeroed_at_the_end_is_zero_at_the_start_of_the_next_step() -> None:
    step = Step()
    gradient = step.alive("gradient", 8)
    step.op("aten::addmm")
    added = accumulating(step, gradient)
    by = zeroing(step, gradient)
    assert zeroed_gradients(step.profile()) == [
        Zeroed(gradient, by, by, by + 1, False),
        Zeroed(gradient, by, 0, added + 1, True),
    ]


def test_several_at_once_with_foreach() -> None:
    step = Step()
    gradients = [step.alive("gradient", 8) for _ in range(3)]
    zeroing(step, *gradients, name="aten::_foreach_zero_")
    found = zeroed_gradients(step.profile())
    assert {z.storage for z in found} == set(gradients)


def test_a_gradient_that_backward_never_reaches() -> None:
    step = Step()
    gradient = step.alive("gradient", 8)
    zeroing(step, gradient)
    step.op("aten::addmm")
    assert not any(z.accumulated for z in zeroed_gradients(step.profile()))


def test_gradients_with_values_between_micro_batches_do_not_count() -> None:
    step = Step()
    gradient = step.alive("gradient", 8)
    by = zeroing(step, gradient)
    first = accumulating(step, gradient)
    step.op("aten::addmm")
    accumulating(step, gradient)
    assert zeroed_gradients(step.profile()) == [Zeroed(gradient, by, by, first + 1, True)]


def test_zeros_that_backward_itself_writes_do_not_count() -> None:
    step = Step()
    made = step.op("aten::empty", makes=8, kind="gradient", phase="backward")
    step.op("aten::zero_", made, mutates=(made,), phase="backward")
    assert zeroed_gradients(step.profile()) == []


def test_zeroing_what_is_no_gradient_does_not_count() -> None:
    step = Step()
    zeroing(step, step.alive("buffer", 8))
    assert zeroed_gradients(step.profile()) == []


def test_a_gradient_of_this_step_is_not_zero_before_it_was_made() -> None:
    step = Step()
    gradient = step.op("aten::mm", makes=8, kind="gradient", phase="backward")
    by = step.op("aten::zero_", gradient, mutates=(gradient,), phase="other").index
    assert zeroed_gradients(step.profile()) == [Zeroed(gradient.out, by, by, by + 1, False)]


def test_a_gradient_dropped_later_is_zero_until_then() -> None:
    step = Step()
    gradient = step.alive("gradient", 8)
    by = zeroing(step, gradient)
    step.op("aten::addmm")
    step.free(gradient)
    step.op("aten::addmm")
    assert zeroed_gradients(step.profile()) == [Zeroed(gradient, by, by, by + 2, False)]
