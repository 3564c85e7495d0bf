from profiles import Step
from torchtrim.rules.tt104_explicit_wait import RULE


def test_a_call_that_is_no_operator_has_its_own_place() -> None:
    step = Step("emulated")
    step.sync("synchronize", line=8)
    step.sync("synchronize", line=8)
    (finding,) = RULE.check(step.profile())
    assert (finding.code, finding.path, finding.line) == ("TT104", "train.py", 8)
    assert finding.count_per_step == 2
    assert "2 x synchronize" in finding.message
