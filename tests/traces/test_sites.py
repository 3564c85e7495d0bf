"""Waits -> places, with the forward line for those of the backward pass."""

from pathlib import Path

import pytest

from recordings import BACKWARD, MAIN, Recording, training
from torchtrim.traces.sites import SourceFolder, SyncSite, hints_of, sites_of
from torchtrim.traces.waiting import find_waits


def sites(made: Recording, folder: Path, source: Path | None = None) -> list[SyncSite]:
    trace = made.trace(folder)
    return sites_of(trace, find_waits(trace), SourceFolder(folder=source) if source else None)


def test_a_copy_and_its_synchronization_are_one_stand(tmp_path: Path) -> None:
    (site,) = sites(training(3), tmp_path)
    assert site.frame is not None
    assert (site.frame.path, site.frame.line, site.frame.function) == ("train.py", 10, "step")
    assert site.op == "aten::_local_scalar_dense"
    assert site.stands == 3
    assert len(site.calls) == 6


def test_the_call_stack_of_older_traces_is_exact(tmp_path: Path) -> None:
    made = Recording()
    stack = "/x/site-packages/torch/nn/a.py(5): f;/home/me/train.py(44): step;/home/me/train.py(9): main"
    made.launch(0, 5, kernel=(10, 50))
    made.op("aten::to", 18, 60, stack=stack)
    made.op("aten::copy_", 19, 58, stack="")
    made.read(20, 75, at=60)
    (site,) = sites(made, tmp_path)
    assert site.frame is not None
    assert site.frame.exact
    assert (site.frame.path, site.frame.line) == ("/home/me/train.py", 44)


def test_a_wait_in_backward_stands_at_its_forward_line(tmp_path: Path) -> None:
    made = Recording()
    made.frame("train.py(30): loss", 0, 100)
    made.op("aten::mul", 10, 20, tid=MAIN, sequence=7, forward_thread=0)
    made.launch(12, 5, kernel=(20, 50))
    made.frame("train.py(60): main", 101, 900)
    name = "autograd::engine::evaluate_function: MulBackward0"
    made.op(name, 300, 200, tid=BACKWARD, sequence=7, forward_thread=1)
    made.op("aten::item", 310, 150, tid=BACKWARD)
    made.read(320, 400, at=350, tid=BACKWARD)
    (site,) = sites(made, tmp_path)
    assert site.frame is not None
    assert (site.frame.function, site.frame.line, site.phase) == ("loss", 30, "backward")


def test_without_stacks_the_annotation_tells_sites_apart(tmp_path: Path) -> None:
    made = Recording()
    for n, mark in enumerate(("## input ##", "## loss ##", "## input ##")):
        made.annotation(mark, n * 100, 90)
        made.op("aten::copy_", n * 100 + 1, 80)
        made.read(n * 100 + 2, n * 100 + 70, at=n * 100 + 40)
    found = {site.within: site.stands for site in sites(made, tmp_path)}
    assert found == {"## input ##": 2, "## loss ##": 1}


def test_the_order_of_calls_tells_one_line_of_several(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(
        "def step(a, b):\n    x = a.item()\n    y = b.item()\n    return x, y\n"
    )
    made = Recording()
    made.frame("train.py(1): step", 0, 500)
    made.frame("<built-in method item of Tensor object at 0x1>", 10, 5)
    made.frame("<built-in method item of Tensor object at 0x2>", 100, 200)
    made.op("aten::item", 101, 190)
    made.read(102, 280, at=200)
    (site,) = sites(made, tmp_path, tmp_path)
    assert site.lines == {3}


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
def sources(tmp_path: Path) -> SourceFolder:
    (tmp_path / "pkg").mkdir()
    (tmp_path / "pkg" / "train.py").write_text(SOURCE)
    (tmp_path / "broken.py").write_text("def f(:\n")
    (tmp_path.parent / "outside.py").write_text("def f(x):\n    x.item()\n")
    return SourceFolder(folder=tmp_path)


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
    sources: SourceFolder,
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
def test_what_is_not_looked_into(sources: SourceFolder, path: str) -> None:
    assert sources.lines(path, 1, "f", ("aten::item",)) == []
