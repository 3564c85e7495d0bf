from profiles import Step
from torchtrim.rules.tt103_blocking_upload import RULE


def test_an_upload_is_found_at_its_line() -> None:
    step = Step("emulated")
    batch = step.alive("input", 400, device="cpu")
    step.sync("upload", step.op("aten::_to_copy", batch, makes=400, line=4))
    (finding,) = RULE.check(step.profile())
    assert (finding.code, finding.line, finding.count_per_step) == ("TT103", 4, 1)
    assert finding.fix is not None
    assert "non_blocking" in finding.fix.reason
