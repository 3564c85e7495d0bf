from __future__ import annotations

from keeping import the_only_finding
from profiles import Step
from torchtrim.rules.tt205_stale_gradients import check


def test_gradients_that_are_dropped_after_the_next_forward() -> None:
    found = the_only_finding("gradients", "TT205")
    assert found.message.startswith("6 gradients of the previous step (")


def step_of(*, added: bool) -> Step:
    step = Step()
    gradient = step.alive("gradient", 500, name="net.weight")
    out = step.op("aten::mm", makes=1000)
    if added:
        step.op("aten::add_", gradient, mutates=(gradient,), phase="backward")
    step.free(gradient)
    step.backward("aten::mm", out, out, makes=10)
    return step


def test_the_price_is_their_bytes_at_the_peak() -> None:
    (found,) = check(step_of(added=False).profile())
    assert found.price_bytes == 490


def test_gradients_that_are_added_to_are_fine() -> None:
    assert not list(check(step_of(added=True).profile()))
