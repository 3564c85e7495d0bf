"""A plan that asks for what there is not ends a verb before its script runs."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from msgspec.structs import replace
from torch import nn

from torchtrim.cli.main import main
from torchtrim.executor.apply import fingerprint_of
from torchtrim.records import Plan, Prediction, Technique
from torchtrim.records.files import load_plan, plan_text, save_proof
from torchtrim.records.plan import PlanProof

VERBS = [
    ("run", "train.py"),
    ("run", "--verify-every", "2", "train.py"),
    ("run", "--processes", "2", "train.py"),
    ("verify", "train.py"),
    ("verify", "--stream", "train.py"),
]


def plan(**changes: object) -> Plan:
    one = {"name": "recompute", "where": ("Net.a",), **changes}
    predicted = Prediction(peak_bytes=7, step_seconds=0.25)
    return Plan(
        torchtrim="0.1.0",
        script="train.py",
        fingerprint={},
        budget_bytes=2**30,
        techniques=(Technique(**one),),  # type: ignore[arg-type]
        predicted=predicted,
    )


@pytest.mark.parametrize("verb", VERBS, ids=" ".join)
@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            plan_text(plan(name="recompte")),
            "entry 1 of [[techniques]] in the plan: there is no technique 'recompte'",
        ),
        (
            plan_text(plan(options={"keap": 1})),
            "Plan again: torchtrim optimize train.py --memory 1073741824",
        ),
        (plan_text(plan(name="../../os")), "there is no technique '../../os'"),
        (plan_text(plan(options={"keap": 1})), "recompute has no option 'keap'"),
        (
            plan_text(plan()).replace("[pins]", "[pinz]"),
            "unknown field `$.pinz`; did you mean `pins`?",
        ),
        (plan_text(plan()).replace("where =", "were = 1\nwhere ="), "`$.techniques[0].were`"),
    ],
)
def test_it_is_named(
    verb: tuple[str, ...],
    text: str,
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text("import pathlib\npathlib.Path('ran').touch()\n")
    Path("plan.toml").write_text(text)
    monkeypatch.setattr("torchtrim.runner.warm.warm_up", lambda *_: None)
    monkeypatch.setattr(sys, "argv", ["torchtrim", *verb, "--plan", "plan.toml"])
    with pytest.raises(SystemExit) as ended:
        main()
    err = capfd.readouterr().err
    assert ended.value.code == 2
    assert said in err
    assert "Traceback" not in err
    assert not Path("ran").exists()


@pytest.mark.parametrize(
    "verb", [("run",), ("verify",), ("optimize", "--memory", "60%")], ids=lambda verb: verb[0]
)
def test_a_plan_that_is_not_there_names_those_that_are_and_how_to_make_one(
    verb: tuple[str, ...],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text("")

    def said(name: str) -> str:
        words = ["torchtrim", *verb, "train.py", "--plan", name, "--", "--lr", "1"]
        monkeypatch.setattr(sys, "argv", words)
        with pytest.raises(SystemExit):
            main()
        return capfd.readouterr().err

    make = "To make one: torchtrim optimize train.py --memory 60% -- --lr 1\n"
    assert said("plan.toml") == f"error: the plan plan.toml does not exist. {make}"
    made = Path("torchtrim-out/train/plan.toml")
    made.parent.mkdir(parents=True)
    made.write_text(plan_text(plan()))
    assert f"Did you mean {made}? To make one" in said("torchtrim-out/train/plam.toml")
    assert f"There are {made}. {make}" in said("x.toml")


def test_a_verdict_is_added_to_a_plan_and_nothing_of_it_is_lost(tmp_path: Path) -> None:
    path = tmp_path / "plan.toml"
    theirs = plan_text(plan()).replace("[pins]", "# mine, [certified] too\n[pins]")
    path.write_text(theirs)
    for steps in (3, 5):
        proof = PlanProof(
            verdict="BITWISE", techniques="0", steps=steps, inputs=("Net: float32[2, 3]",)
        )
        assert save_proof(proof, path)
        assert load_plan(path) == replace(plan(), certified=proof)
        assert set(theirs.splitlines()) <= set(path.read_text().splitlines())
    path.write_text(f"certified = {{}}\n{theirs}")
    assert not save_proof(proof, path)
    assert path.read_text() == f"certified = {{}}\n{theirs}"


IN_A_THREAD = """import sys
import threading
import torch
model = torch.nn.Sequential(torch.nn.Linear(4, 4))
def train():
    model(torch.ones(2, 4)).sum().backward()
def calls():
    model.eval()
    model(torch.ones(2, 4))
if sys.argv[1] == "others":
    model = torch.nn.Sequential(torch.nn.Linear(4, 5))
if sys.argv[1] in ("thread", "others", "calls"):
    thread = threading.Thread(target=calls if sys.argv[1] == "calls" else train)
    thread.start()
    thread.join()
if sys.argv[1] == "main":
    train()
sys.exit(0 if sys.argv[1] != "fails" else 4)
"""


@pytest.mark.parametrize(
    ("how", "code", "said"),
    [
        ("main", 0, ""),
        ("fails", 4, ""),
        (
            "never",
            0,
            "the plan left Sequential unchanged, which the script never ran",
        ),
        ("thread", 0, ""),
        ("others", 2, "error: the plan was made for another Sequential"),
        (
            "calls",
            0,
            "the plan left Sequential unchanged, which the script never ran in the thread",
        ),
    ],
)
def test_a_plan_that_was_never_applied_is_told(
    how: str,
    code: int,
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text(IN_A_THREAD)
    known = {"Sequential": fingerprint_of(nn.Sequential(nn.Linear(4, 4)))}
    Path("plan.toml").write_text(
        plan_text(replace(plan(where=("Sequential.0",)), fingerprint=known))
    )
    words = ["torchtrim", "run", "train.py", "--plan", "plan.toml", "--quiet", "--", how]
    monkeypatch.setattr(sys, "argv", words)
    monkeypatch.setattr(sys, "path", [*sys.path])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == code
    err = capfd.readouterr().err
    assert said in err
    assert ("torchtrim: " in err) == said.startswith("the plan left")


IN_PARTS = """import os
import threading
import torch
class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = torch.nn.Linear(4, 4)
        self.inner.forward = lambda xs, own=self.inner.forward: own(next(xs))
    def forward(self, x):
        return self.inner(one for one in [x])
def train():
    Net()(torch.ones(2, 4)).sum().backward()
thread = threading.Thread(target=train)
thread.start()
thread.join()
os._exit(5)
"""


def test_a_plan_that_fails_in_a_thread_ends_the_script(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text(IN_PARTS)
    parts = Technique(name="micro_batch", where=("Net.inner",), options={"parts": 2})
    Path("plan.toml").write_text(plan_text(replace(plan(), techniques=(parts,), fingerprint={})))
    monkeypatch.setattr(sys, "argv", ["torchtrim", "run", "train.py", "--plan", "plan.toml"])
    monkeypatch.setattr(sys, "path", [*sys.path])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    err = capfd.readouterr().err
    assert "error: `Net.inner` cannot run in parts of the batch" in err
    assert "Traceback" not in err
