"""An exported plan runs where there is no torchtrim, and computes what the plan does."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from steps import ConvNet, fitting, flat, images, train_step
from torchtrim.errors import ExportFailed
from torchtrim.executor.apply import fingerprint_of
from torchtrim.executor.export import exported
from torchtrim.executor.registry import Exportable, names, technique
from torchtrim.records.plan import Plan, Prediction, Technique
from torchtrim.records.trial import Request
from torchtrim.workflows.optimize.report import export_report

ALONE = """
import sys


class NoTorchtrim:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "torchtrim":
            raise ImportError("there is no torchtrim here")


sys.meta_path.insert(0, NoTorchtrim())
sys.path[:0] = sys.argv[1:3]
import torch
from torch import nn
import planned
from alone import Net, saved_by


def steps(how):
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    applied = planned.apply(model) if how else None
    seen, saved = [], []
    for number in range(3):
        optimizer.zero_grad()
        loss = saved_by(lambda: model(torch.randn(4, 3, 8, 8)).square().mean(), saved)
        loss.backward()
        seen += [loss.detach(), *(p.grad.clone() for p in model.parameters())]
        optimizer.step()
    seen += [value.clone() for value in model.state_dict().values()] + [torch.get_rng_state()]
    if applied is not None:
        applied.revert()
        assert all(type(part).__module__ in ("alone", *TORCH) for part in model.modules())
        assert not any(getattr(part, "inplace", False) for part in model.modules())
    return seen, sum(saved)


TORCH = {type(part).__module__ for part in Net().modules()}
(one, all_), (other, few) = steps(False), steps(True)
assert len(one) == len(other) and all(map(torch.equal, one, other))
assert few < 0.7 * all_, (few, all_)
try:
    planned.apply(nn.Linear(2, 2))
except planned.ApplyFailed as error:
    print(error)
wide = Net()
wide.last = nn.Linear(8, 3)
try:
    planned.apply(wide)
except planned.ApplyFailed as error:
    print(error)
assert type(wide.blocks[0]).__module__ == "alone"
"""

MODEL = """
import torch
from torch import nn


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.drop, self.calls = nn.Dropout(0.2), 0

    def forward(self, x, scale=1.0):
        self.calls += 1
        return x + scale * self.drop(torch.relu(self.norm(self.conv(x))))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU())
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.chain = nn.Sequential(*(m for _ in range(4) for m in (nn.Conv2d(8, 8, 1), nn.Tanh())))
        self.last = nn.Linear(8, 2)

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = block(x, scale=0.5)
        return self.last(self.chain(x).mean((2, 3)))


def saved_by(function, into):
    def pack(tensor):
        into.append(tensor.nbytes)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        return function()
"""


def plan_of(model: nn.Module, *techniques: Technique) -> Plan:
    return Plan(
        torchtrim="0",
        script="train.py",
        fingerprint={type(model).__name__: fingerprint_of(model)},
        budget_bytes=1,
        techniques=techniques,
        predicted=Prediction(peak_bytes=1, step_seconds=1.0),
    )


@pytest.mark.slow
def test_it_runs_where_there_is_no_torchtrim_bit_for_bit(tmp_path: Path) -> None:
    (tmp_path / "alone.py").write_text(MODEL)
    (tmp_path / "run.py").write_text(ALONE)
    sys.path.insert(0, str(tmp_path))
    try:
        from alone import Net  # type: ignore[import-not-found]
    finally:
        sys.path.pop(0)
    places = ("Net.blocks.0", "Net.blocks.2", "Net.chain[0:4]", "Net.chain[4:8]")
    plan = plan_of(
        Net(),
        Technique(name="recompute", where=places),
        Technique(name="overwrite", where=("Net.first.1",)),
    )
    text = exported(plan, "What it is.")
    assert "import torchtrim" not in text
    assert "from torchtrim" not in text
    (tmp_path / "planned.py").write_text(text)
    ran = subprocess.run(
        [sys.executable, "run.py", str(tmp_path), str(tmp_path)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.splitlines() == [
        "the plan is for Net, and this is a Linear.",
        "the plan was made for another Net. Plan again for this one.",
    ]


IN_ANY_ORDER = """
from torchtrim.executor.export import exported
from torchtrim.records.plan import Plan, Prediction, Technique

techniques = Technique(name="overwrite", where=("Net",)), Technique(name="recompute", where=("Net",))
predicted = Prediction(peak_bytes=1, step_seconds=1.0)
rest = dict(torchtrim="0", script="", fingerprint={}, budget_bytes=1, predicted=predicted)
text = exported(Plan(techniques=techniques, **rest), "What it is.")
exec(compile(text, "planned.py", "exec"), {"__name__": "planned"})
print(text)
"""


@pytest.mark.slow
def test_it_is_the_same_text_and_runs_whatever_the_hashes_of_names_are() -> None:
    def text(seed: str) -> str:
        environment = {**os.environ, "PYTHONHASHSEED": seed}
        return subprocess.run(
            [sys.executable, "-c", IN_ANY_ORDER],
            env=environment,
            capture_output=True,
            text=True,
            check=True,
        ).stdout

    texts = {text(seed) for seed in ("0", "2", "3", "4")}
    assert len(texts) == 1
    assert "def rerun_places" in texts.pop()


@pytest.mark.parametrize("model", [lambda: ConvNet(blocks=3), flat])
def test_it_is_certified_and_needs_what_the_plan_needs(model) -> None:
    torch.manual_seed(0)
    step = train_step(model(), images(16))
    result = export_report(step, "75%", Request(steps=1))
    report = result.report
    assert report.certificate is not None
    assert report.certificate.verdict == "BITWISE"
    assert report.planned is not None
    assert result.plan is not None
    assert report.planned.peak_bytes <= result.plan.budget_bytes
    assert "BITWISE over" in result.exported.partition('"""\n')[0]
    assert fitting(step, 1).run_planned(result.plan).peak_bytes == report.planned.peak_bytes


def test_an_exported_plan_that_computes_something_else_is_not_given(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from torchtrim.workflows.optimize import fitting as optimize

    def broken(plan: Plan, said: str) -> str:
        return exported(plan, said).replace("preserve_rng_state=True", "preserve_rng_state=False")

    monkeypatch.setattr(optimize, "exported", broken)
    torch.manual_seed(0)
    with pytest.raises(ExportFailed, match="does not compute the same"):
        export_report(train_step(ConvNet(), images(16)), "75%", Request(steps=1))


def test_a_technique_that_cannot_be_exported_is_named() -> None:
    model = ConvNet()
    one = Technique(name="relative_attention", where=("ConvNet.head",))
    assert not isinstance(technique("relative_attention"), Exportable)
    with pytest.raises(ExportFailed, match=r"relative_attention cannot be exported.*ConvNet.head"):
        exported(plan_of(model, one), "")
    assert ExportFailed.exit_code == 1


def test_whatever_can_be_exported_is_in_one_module_together() -> None:
    model = ConvNet()
    ours = [name for name in names() if isinstance(technique(name), Exportable)]
    assert set(ours) >= {"recompute", "overwrite"}
    text = exported(
        plan_of(model, *(Technique(name=name, where=()) for name in ours)), "What it is."
    )
    functions = [technique(name).export().function for name in ours]  # type: ignore[attr-defined]
    assert [text.count(f"def {function}(") for function in functions] == [1] * len(ours)
    tree = ast.parse(text)
    made = [one.name for one in tree.body if isinstance(one, (ast.FunctionDef, ast.ClassDef))]
    assert len(made) == len(set(made))
