from profiles import Step
from torchtrim.rules.tt105_unsynchronized_copy import check


def test_a_race_is_about_values_and_has_no_price() -> None:
    step = Step("emulated")
    step.sync("async-read", line=8)
    (finding,) = check(step.profile())
    assert (finding.code, finding.line) == ("TT105", 8)
    assert finding.price_ms is None
    assert "may be wrong" in finding.message
    assert "on the host" not in finding.message
