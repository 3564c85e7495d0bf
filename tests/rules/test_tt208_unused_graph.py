from __future__ import annotations

import pytest

from keeping import the_only_finding
from profiles import Step
from torchtrim.rules.tt208_unused_graph import check


def test_a_model_that_is_evaluated_with_gradients() -> None:
    found = the_only_finding("evaluation", "TT208")
    assert found.message.startswith(
        "Sequential runs with gradients, and no backward uses what autograd keeps ("
    )


@pytest.mark.parametrize(("graded", "used"), [(True, False), (False, False), (True, True)])
def test_only_calls_with_gradients_that_no_backward_uses(graded: bool, used: bool) -> None:
    step = Step()
    with step.module("net", graded=graded):
        out = step.op("aten::mm", makes=1000, line=3)
        last = step.op("aten::relu", out, makes=1000)
    if used:
        step.save(out, out, step.backward("aten::mm", out, out))
    else:
        step.op("aten::mm", last, makes=500, phase="other")
    found = list(check(step.profile()))
    assert [(one.line, one.price_bytes) for one in found] == [(3, 500)] * (graded and not used)
