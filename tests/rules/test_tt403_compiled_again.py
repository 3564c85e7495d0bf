from __future__ import annotations

from pathlib import Path

import pytest
from msgspec.structs import replace

from profiles import Step
from torchtrim.records.finding import Finding
from torchtrim.records.profile import CompiledFunction
from torchtrim.rules.tt403_compiled_again import check

SIZE = "tensor 'args[0]' size mismatch at index 0. expected 3, actual 4"


def found(
    steps: int, guard: str = SIZE, function: str = "forward", project: str = ""
) -> list[Finding]:
    """A function that was compiled in some of five steps, for two seconds after the first."""
    again = CompiledFunction(
        function=function,
        path="model.py" if function else "",
        line=7 if function else 0,
        steps=steps,
        watched=5,
        seconds=2.0,
        guard=guard,
    )
    step = Step()
    step.op("aten::addmm")
    return list(check(replace(step.profile(project=project), compiled=[again])))


@pytest.mark.parametrize(("steps", "count"), [(2, 0), (3, 1), (5, 1)])
def test_the_second_compile_may_be_the_last(steps: int, count: int) -> None:
    assert len(found(steps)) == count


def test_the_price_is_the_time_of_compiling_again_in_a_step() -> None:
    (finding,) = found(5)
    assert finding.price_ms == pytest.approx(500)
    assert (finding.code, finding.path, finding.line) == ("TT403", "model.py", 7)
    assert finding.message == (
        f"torch compiled `forward` in 5 of 5 steps, 500 ms a step; the guard that failed last: {SIZE}"
    )


@pytest.mark.parametrize(
    ("guard", "advice"),
    [
        (SIZE, "dynamic=True"),
        ("x.size()[0] == 3", "dynamic=True"),
        ("temperature == 2.0", "make `temperature` a tensor"),
        ("self.param_groups[0]['lr'] == 1e-05", "lr=torch.tensor("),
        ("name == 'abc'", "keep what this condition names the same"),
        ("", "keep what this condition names the same"),
    ],
)
def test_the_advice_is_for_what_changes(guard: str, advice: str) -> None:
    (finding,) = found(4, guard)
    assert finding.fix is not None
    assert advice in finding.fix.reason


def test_a_module_of_a_library_is_named_by_the_line_that_compiles_it(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("import torch\nmodel = torch.compile(net)\n")
    (finding,) = found(5, function="", project=str(tmp_path))
    assert finding.line == 2
    assert finding.message.startswith("torch compiled the same module in 5 of 5 steps")
