"""Waits -> places, with the forward line for those of the backward pass."""

from pathlib import Path

from recordings import BACKWARD, MAIN, Recording, training
from torchtrim.traces.lines import Sources
from torchtrim.traces.sites import Site, sites_of
from torchtrim.traces.waiting import find_waits


def sites(made: Recording, folder: Path, source: Path | None = None) -> list[Site]:
    trace = made.trace(folder)
    return sites_of(trace, find_waits(trace), Sources(folder=source) if source else None)


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
