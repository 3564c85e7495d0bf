from __future__ import annotations

import pytest
from msgspec.structs import replace

from profiles import Step
from torchtrim.records.profile import CompiledFunction
from torchtrim.rules import tt403_compiled_again
from torchtrim.rules.tt404_graph_break import check


@pytest.mark.parametrize(("broken", "count"), [(False, 0), (True, 1)])
def test_a_line_that_ends_a_graph_is_one_finding(*, broken: bool, count: int) -> None:
    rest = CompiledFunction(
        function="forward",
        path="model.py",
        line=7,
        steps=1,
        watched=5,
        seconds=0.0,
        guard="",
        broken=broken,
    )
    step = Step()
    step.op("aten::addmm")
    profile = replace(step.profile(), compiled=[rest, rest])
    found = [*check(profile)]
    assert [(one.code, one.path, one.line) for one in found] == [("TT404", "model.py", 7)] * count
    assert all(one.message.startswith("the graph of `forward` breaks here") for one in found)
    assert not [*tt403_compiled_again.check(profile)]
