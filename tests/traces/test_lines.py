"""The line of the call inside the function that the trace names."""

from pathlib import Path

import pytest

from torchtrim.traces.lines import Sources, hints_of

SOURCE = """\
import torch


@torch.no_grad()
def step(model, batch, mask):
    batch = batch.to("cuda")
    loss = (
        model(batch)
        .sum()
    )
    picked = loss[mask]
    values = [one.item() for one in picked]
    if loss > 0:
        picked[mask] = loss
    def inner():
        return loss.item()
    return loss.cpu(), values


class Other:
    def step(self, x):
        return x.item(), x.tolist()
"""


@pytest.fixture
def sources(tmp_path: Path) -> Sources:
    (tmp_path / "pkg").mkdir()
    (tmp_path / "pkg" / "train.py").write_text(SOURCE)
    (tmp_path / "broken.py").write_text("def f(:\n")
    (tmp_path.parent / "outside.py").write_text("def f(x):\n    x.item()\n")
    return Sources(folder=tmp_path)


@pytest.mark.parametrize(
    ("definition", "function", "child", "operators", "lines"),
    [
        (4, "step", "<built-in method to of Tensor object at 0x7>", (), [6]),
        (4, "step", "<built-in method cpu of Tensor object at 0x7>", (), [17]),
        (4, "step", "<built-in method sum of Tensor object>", (), [9]),
        (4, "step", "", ("aten::index",), [11]),
        (4, "step", "", ("aten::index_put_",), [14]),
        (4, "step", "", ("aten::is_nonzero", "aten::item"), [13]),
        (4, "step", "", ("aten::to", "aten::_to_copy", "aten::copy_"), [6, 17]),
        (5, "step", "torch/x.py(7): model", (), [8]),
        (12, "<listcomp>", "<built-in method item of Tensor object>", (), [12]),
        (15, "inner", "", ("aten::item",), [16]),
        (21, "step", "", ("aten::item",), [22]),
        (99, "step", "", ("aten::item",), []),
        (4, "nothing", "", ("aten::item",), []),
        (4, "step", "", ("aten::conv2d",), []),
    ],
)
def test_lines(
    sources: Sources,
    definition: int,
    function: str,
    child: str,
    operators: tuple[str, ...],
    lines: list[int],
) -> None:
    found = sources.lines(
        "/somewhere/pkg/train.py", definition, function, hints_of(child, operators)
    )
    assert found == lines


@pytest.mark.parametrize(
    "path", ["none.py", "broken.py", "../outside.py", "/etc/passwd", "pkg", "\0.py", "a/" * 999]
)
def test_what_is_not_looked_into(sources: Sources, path: str) -> None:
    assert sources.lines(path, 1, "f", ("aten::item",)) == []
