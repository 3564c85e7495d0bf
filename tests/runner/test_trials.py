"""Unmodified scripts: found, recorded, stopped; and each way to fail gets its message."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from steps import quiet
from torchtrim import ApplyFailed, Script, ScriptFailed, UsageError
from torchtrim.certify.compare import differences
from torchtrim.dispatch.places import project_of
from torchtrim.errors import PlannedStepFailed
from torchtrim.records.budget import Budget
from torchtrim.records.plan import Plan, Prediction
from torchtrim.records.trial import Crash, Request, Trial
from torchtrim.runner import trials
from torchtrim.runner.script import Ended
from torchtrim.runner.trials import run_trial
from torchtrim.workflows.optimize.fitting import Fitting

SCRIPTS = Path(__file__).parent.parent / "scripts"


def run(name: str, *args: str, timeout: float = 120, steps: int = 3) -> Trial:
    script = Script(str(SCRIPTS / f"{name}.py"), args, timeout=timeout)
    return Fitting(script, Request(steps=steps), quiet).observe()


def fails(*args: str, timeout: float = 120) -> ScriptFailed:
    with pytest.raises(ScriptFailed) as caught:
        run("faults", *args, timeout=timeout)
    return caught.value


@pytest.mark.parametrize(
    ("args", "losses"),
    [
        ((), 1),
        (("--workers", "2"), 1),
        pytest.param(("--workers", "1", "--context", "spawn"), 1, marks=pytest.mark.slow),
        (("--accumulate", "2"), 2),
        (("--amp",), 1),
    ],
)
def test_loops(args: tuple[str, ...], losses: int) -> None:
    trial = run("plain", *args)
    assert len(trial.steps) == 5
    assert [len(step.losses) for step in trial.steps] == [losses, 0, losses, losses, losses]
    assert trial.optimizer_steps == 5
    assert trial.seeds == "script"
    assert list(trial.fingerprint) == ["Sequential"]
    profile = trial.profile
    assert profile is not None
    assert len(profile.waits) >= losses
    assert {op.phase for op in profile.operators} >= {"forward", "backward", "optimizer"}
    assert all(step.peak_bytes for step in trial.steps[1:])


@pytest.mark.parametrize("device", ["cpu", "emulated"])
def test_a_run_without_figures_has_the_same_evidence(device: str, tmp_path: Path) -> None:
    script = Script(str(SCRIPTS / "plain.py"), (), device=device, timeout=120)
    (whole, bare) = (
        run_trial(script, Request(measured=measured), tmp_path) for measured in (True, False)
    )
    assert differences(whole, bare) == []
    assert [len(step.digests) for step in whole.steps] == [len(step.digests) for step in bare.steps]
    assert whole.profile is not None
    assert bare.profile is None
    assert not any(step.peak_bytes for step in bare.steps)


def test_relative_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "here.txt").write_text("found")
    monkeypatch.chdir(tmp_path)
    assert len(run("plain", "--read", "here.txt", steps=1).steps) == 3


def test_a_script_that_ends_closes_its_last_step() -> None:
    trial = run("plain", "--epochs", "1")
    assert len(trial.steps) == 4


def test_a_device_by_its_number_is_emulated(tmp_path: Path) -> None:
    script = tmp_path / "number.py"
    text = (SCRIPTS / "swallows.py").read_text()
    script.write_text(f"import torch\ndevice = torch.device(0)\n{text}")
    trial = run_trial(Script(str(script), timeout=120), Request(steps=1), tmp_path)
    assert trial.device.startswith("emulated")
    with pytest.raises(ScriptFailed, match="Cannot access accelerator device"):
        run_trial(Script(str(script), device="cpu", timeout=120), Request(steps=1), tmp_path)


def test_two_optimizers_are_one_step() -> None:
    trial = run("gan")
    assert [len(step.losses) for step in trial.steps] == [4, 0, 2, 2, 2]
    assert list(trial.fingerprint) == ["Sequential", "Sequential#2"]


def test_a_bare_except_does_not_keep_it_running() -> None:
    trial = run("swallows")
    assert len(trial.steps) == 5
    assert trial.seeds == "torchtrim"


def test_a_script_equals_itself() -> None:
    assert differences(run("plain"), run("plain")) == []
    assert differences(run("swallows"), run("swallows")) == []


@pytest.mark.parametrize(("kind", "steps"), [("one", 1), ("two", 2), ("three", 3), ("leaves", 2)])
def test_short_scripts(kind: str, steps: int) -> None:
    trial = run("faults", kind)
    assert len(trial.steps) == steps
    assert trial.profile is not None
    assert trial.profile.operators


def test_a_module_runs_as_python_m(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "mine"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "train.py").write_text((SCRIPTS / "plain.py").read_text())
    monkeypatch.chdir(tmp_path)
    script = Script("mine.train", ("--accumulate", "2"), module=True)
    trial = Fitting(script, Request(steps=1), quiet).observe()
    assert len(trial.steps) == 3


def test_a_crash() -> None:
    error = fails("crash")
    assert error.exit_code == 3
    assert "ValueError: the sixth seal" in str(error)
    assert 'raise ValueError("the sixth seal")' in error.traceback
    assert "torchtrim/capture" not in error.traceback
    assert "1 optimizer steps" in error.learnt


def test_a_crash_in_an_operator() -> None:
    error = fails("crash-in-step")
    assert "aten.addmm.default" in error.learnt
    assert "float32[16, 65]" in error.learnt
    assert "faults.py:" in error.learnt


def test_out_of_memory_says_who_was_alive() -> None:
    error = fails("memory")
    assert "ran out of memory" in str(error)
    assert "aten.new_empty.default" in error.learnt
    assert "were live then" in error.learnt
    assert "1.00 MiB" in error.learnt


@pytest.mark.parametrize(
    ("kind", "says"),
    [
        ("exit", "exited with 3"),
        ("leaves-early", "exited with 5"),
        ("early", "without calling a module"),
        ("no-optimizer", "no torch.optim.Optimizer ever stepped"),
        ("stdin", "reads standard input"),
        ("killed", "SIGKILL"),
    ],
)
def test_other_ends(kind: str, says: str) -> None:
    assert says in str(fails(kind))


@pytest.mark.parametrize(
    ("message", "forwards", "says"),
    [
        ("EOFError: EOF when reading a line", 0, "an earlier run left"),
        ("FileExistsError: [Errno 17] File exists: 'logs'", 0, "before the plan changed anything"),
        ("RuntimeError: shape", 3, "the script failed: RuntimeError: shape"),
    ],
)
def test_what_fails_before_the_model_runs_is_no_fault_of_the_plan(
    message: str, forwards: int, says: str
) -> None:
    crash = Crash(kind="crashed", message=message)
    outcome = msgspec.json.encode(Trial(request=Request(), crash=crash, forwards=forwards))
    planned: Any = SimpleNamespace(plan=SimpleNamespace(techniques=("replay",)), double=False)
    with pytest.raises(ScriptFailed, match=says) as raised:
        trials._trial_of(Script("asks.py"), planned, Ended(outcome, 0, "", "", timed_out=False))
    assert isinstance(raised.value, PlannedStepFailed) == bool(forwards)


@pytest.mark.slow
def test_a_script_that_hangs_is_stopped() -> None:
    for timeout in (4, 30):
        begin = time.monotonic()
        error = fails("hang", timeout=timeout)
        assert time.monotonic() - begin < timeout + 25
        assert f"stopped after {timeout} s" in str(error)
        if "step 1" in error.learnt:
            return
    pytest.fail("on a busy machine too, the first step ends within half a minute, and is told")


def test_no_such_script() -> None:
    with pytest.raises(UsageError, match="does not exist"):
        run("none")


def test_a_plan_for_another_model_is_refused(tmp_path: Path) -> None:
    script = Script(str(SCRIPTS / "plain.py"))
    fitting = Fitting(script, Request(steps=1), quiet)
    planner = fitting.planner(fitting.observe())
    plan = planner.floor_plan(Budget(1))
    other = Script(str(SCRIPTS / "gan.py"))
    with pytest.raises(ApplyFailed, match="made for another"):
        run_trial(other, Request(steps=1, plan=plan), tmp_path)


@pytest.mark.skipif(os.name != "posix", reason="signals")
@pytest.mark.parametrize(
    ("number", "code"),
    [(signal.SIGINT, 130), pytest.param(signal.SIGTERM, 143, marks=pytest.mark.slow)],
)
def test_an_interrupt_leaves_nothing(tmp_path: Path, number: int, code: int) -> None:
    command = [sys.executable, "-m", "torchtrim", "diagnose", str(SCRIPTS / "faults.py")]
    environment = {**os.environ, "TMPDIR": str(tmp_path / "t")}
    (tmp_path / "t").mkdir()
    process = subprocess.Popen(
        [*command, "--", "hang"],
        cwd=tmp_path,
        env=environment,
        stderr=subprocess.PIPE,
        preexec_fn=_hears_interrupts,
    )
    deadline = time.monotonic() + 60
    while not list((tmp_path / "t").glob("*/status")) and time.monotonic() < deadline:
        time.sleep(0.1)
    process.send_signal(number)
    try:
        process.communicate(timeout=30)
    finally:
        process.kill()
        process.communicate()
    assert process.returncode == code
    assert list((tmp_path / "t").iterdir()) == []
    assert sorted(tmp_path.iterdir()) == [tmp_path / "t"]
    time.sleep(0.3)
    assert "runner.worker" not in _processes(str(tmp_path))


def _hears_interrupts() -> None:
    """A shell's background jobs ignore interrupts, and so would what they start."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def _processes(word: str) -> str:
    found = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True)
    return "\n".join(line for line in found.stdout.splitlines() if word in line)


def test_the_project_is_the_nearest_with_a_mark(tmp_path: Path) -> None:
    inner = tmp_path / "a" / "b"
    inner.mkdir(parents=True)
    (tmp_path / "a" / "pyproject.toml").write_text("")
    assert project_of(inner / "s.py") == tmp_path / "a"


def test_a_script_of_one_step_has_a_peak_under_a_plan(tmp_path: Path) -> None:
    script = tmp_path / "once.py"
    script.write_text(
        "import torch\n"
        "model = torch.nn.Linear(64, 64)\n"
        "optimizer = torch.optim.SGD(model.parameters(), 0.1)\n"
        "model(torch.ones(256, 64)).exp().sum().backward()\n"
        "optimizer.step()\n"
    )
    nothing = Prediction(peak_bytes=0, step_seconds=0.0, device="cpu")
    plan = Plan(torchtrim="", script="", fingerprint={}, budget_bytes=0, predicted=nothing)
    original, planned = (
        run_trial(Script(str(script), timeout=120), Request(plan=under), tmp_path)
        for under in (None, plan)
    )
    assert len(planned.steps) == 1
    assert planned.peak_bytes == original.peak_bytes > 0
