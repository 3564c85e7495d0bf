from profiles import Step
from torchtrim.rules.tt102_data_dependent_shape import RULE


def test_a_mask_waits_in_forward_and_again_in_backward() -> None:
    step = Step("emulated")
    losses = step.alive("activation", 400)
    picked = step.op("aten::index.Tensor", losses, makes=100, line=9)
    spread = step.op("aten::index_put", losses, phase="backward", forward=picked.index)
    step.sync("mask-index", picked)
    step.sync("mask-assign", spread)
    (finding,) = RULE.check(step.profile())
    assert (finding.code, finding.line, finding.count_per_step) == ("TT102", 9, 2)
    assert "index, index_put in backward" in finding.message
    assert finding.fix is not None
    assert "torch.where" in finding.fix.reason


def test_a_step_without_waits_has_no_finding() -> None:
    step = Step("cpu")
    step.op("aten::nonzero", step.alive("input", 16), line=5)
    assert not list(RULE.check(step.profile()))
