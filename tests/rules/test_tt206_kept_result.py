from __future__ import annotations

from keeping import the_only_finding
from profiles import Step
from torchtrim.rules.tt206_kept_result import check


def test_logits_that_have_a_name() -> None:
    found = the_only_finding("logits", "TT206")
    assert found.message.startswith("a variable keeps this result after its last use")
    assert found.path.endswith("keeps.py")


def test_a_batch_that_has_a_name_through_the_next_step() -> None:
    found = the_only_finding("batch", "TT206", "fresh batch")
    assert "a variable keeps this result" in found.message


def step_of(*, read: bool, size: int = 500) -> Step:
    step = Step()
    old = step.alive("input", 500)
    hidden = step.op("aten::argmax", *((old,) if read else ()), makes=1000)
    step.op("aten::mm", hidden, makes=size, line=7)
    step.free(old, hidden)
    step.op("aten::sub_", phase="optimizer")
    return step


def test_what_is_kept_through_a_later_peak() -> None:
    step = Step()
    logits = step.op("aten::mm", makes=500, line=7)
    step.op("aten::nll_loss_forward", logits, line=8)
    step.op("aten::sub_", phase="optimizer", transient=4000)
    (found,) = check(step.profile())
    assert (found.line, found.price_bytes) == (7, 500)


def test_it_points_at_what_takes_the_name() -> None:
    (found,) = check(step_of(read=False).profile())
    assert (found.line, found.price_bytes) == (7, 500)


def test_what_is_read_or_gets_no_heir_is_fine() -> None:
    assert not list(check(step_of(read=True).profile()))
    assert not list(check(step_of(read=False, size=400).profile()))
