"""A run that is checked while it goes on does what it would do unchecked; what differs stops it."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

import torchtrim
from torchtrim.certify.variants import judge
from torchtrim.errors import UsageError
from torchtrim.evidence.evidence import keep_value
from torchtrim.planner.plans import build_plan
from torchtrim.records.files import save_plan
from torchtrim.records.plan import Prediction, Technique
from torchtrim.records.trial import TrialStep
from torchtrim.runner.live import Shadow, ShadowTask
from torchtrim.runner.script import Script
from torchtrim.workflows.verify import run_checked

SCRIPT = Path(__file__).parents[1] / "scripts" / "lasting.py"
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="copies of a process are Linux's")


class Ended(NamedTuple):
    code: int
    out: str
    err: str
    folder: Path


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory):  # type: ignore[no-untyped-def]
    """Runs the script of a kind with options, once for each."""

    @functools.cache
    def run(kind: str, *options: str) -> Ended:
        folder = tmp_path_factory.mktemp(kind)
        recompute = Technique(name="recompute", where=("Sequential.0", "Sequential.1"))
        predicted = Prediction(peak_bytes=0, step_seconds=0.0)
        plan = build_plan(
            "", fingerprint={}, techniques=(recompute,), predicted=predicted, budget_bytes=1
        )
        save_plan(plan, folder / "plan.toml")
        words = ("--plan", "plan.toml", *options) if options else ()
        command = (sys.executable, "-m", "torchtrim", "run", *words, str(SCRIPT), "--", kind)
        source = str(Path(torchtrim.__file__).parents[1])
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": source}
        done = subprocess.run(
            command, cwd=folder, env=environment, capture_output=True, text=True, timeout=500
        )
        return Ended(done.returncode, done.stdout, done.stderr, folder)

    return run


@pytest.mark.slow
def test_a_checked_run_does_what_it_would(run) -> None:  # type: ignore[no-untyped-def]
    plain, checked = run("plain"), run("plain", "--verify-every", "3")
    assert checked.code == 0, checked.err
    assert checked.out == plain.out
    assert (checked.folder / "log.txt").read_text() == (plain.folder / "log.txt").read_text()
    assert [f"step {n}: equals the original, every bit of" in checked.err for n in (3, 6, 9)] == [
        True
    ] * 3
    assert "3 of 3 checked steps equal the original; that took" in checked.err
    assert "MiB more" in checked.err


@pytest.mark.slow
def test_batches_of_other_processes_stay_as_they_are(run) -> None:  # type: ignore[no-untyped-def]
    plain, checked = run("workers"), run("workers", "--verify-every", "4")
    assert checked.code == 0, checked.err
    assert checked.out == plain.out
    assert "2 of 2 checked steps equal" in checked.err


@pytest.mark.slow
def test_a_difference_stops_the_run_and_keeps_its_state(run) -> None:  # type: ignore[no-untyped-def]
    plain, stopped = run("breaks"), run("breaks", "--verify-every", "1")
    assert stopped.code == 1
    lines = plain.out.splitlines(keepends=True)
    assert stopped.out == "".join(lines[:12])
    assert "error: step 7 differs from the original, first in" in stopped.err
    state = torch.load(stopped.folder / "lasting-before-step-7.pt", weights_only=True)
    assert state["steps"] == 6
    assert state["models"]["Sequential"]["0.norm.num_batches_tracked"] == 6
    (adam,) = state["optimizers"].values()
    assert adam["state"][0]["step"] == 6


@pytest.mark.slow
def test_a_difference_reverts_the_plan(run) -> None:  # type: ignore[no-untyped-def]
    plain = run("breaks")
    reverted = run("breaks", "--verify-every", "7", "--on-difference", "revert")
    assert reverted.code == 0
    assert reverted.out == plain.out
    assert (reverted.folder / "log.txt").read_text() == (plain.folder / "log.txt").read_text()
    assert "the plan was reverted before step 7" in reverted.err


@pytest.mark.slow
def test_a_step_that_writes_in_its_midst_is_not_checked(run) -> None:  # type: ignore[no-untyped-def]
    checked = run("writes", "--verify-every", "6")
    assert checked.code == 0
    assert checked.out == run("writes").out
    assert "not checked: the step writes middle.txt, and cannot be run a second time" in checked.err
    assert (checked.folder / "middle.txt").read_text() == "9"


def test_it_needs_a_plan() -> None:
    with pytest.raises(UsageError, match="give a plan that changes something"):
        run_checked(Script("train.py"), None, 3)


def shadow(**digests: str) -> Shadow:
    return Shadow(
        step=TrialStep(digests={f"loss:{name}": value for name, value in digests.items()})
    )


@pytest.mark.parametrize(
    ("one", "other", "found", "said"),
    [
        (shadow(a="1"), shadow(a="1"), "equal", "every bit of 1 values"),
        (shadow(a="1"), shadow(a="2"), "different", "first in loss:a"),
        (Shadow(failed="ValueError: x"), Shadow(failed="ValueError: y"), "equal", "fails as"),
        (shadow(), Shadow(failed="ValueError: x"), "different", "the planned step fails"),
        (Shadow(failed="ValueError: x"), shadow(), "different", "the original fails"),
        (Shadow(effect="calls os.fork"), shadow(), "unchecked", "the step calls os.fork"),
        (None, shadow(), "unchecked", "died or took too long"),
    ],
)
def test_verdicts(one: Shadow | None, other: Shadow | None, found: str, said: str) -> None:
    verdict = judge(lambda ask: other if ask.planned else one, rounds=False)
    assert verdict.found == found
    assert said in verdict.reason


def kept(ask: ShadowTask, value: float) -> None:
    for number in range(len(ask.keep)):
        keep_value(ask.folder / f"kept-{number}", torch.tensor(value))


@pytest.mark.parametrize(("gap", "found"), [(1e-4, "equal"), (0.5, "different")])
def test_rounding_is_bounded(gap: float, found: str) -> None:
    def asked(ask: ShadowTask) -> Shadow:
        kept(ask, 1.0 + gap * ask.planned)
        return shadow(a=str(ask.planned))

    assert judge(asked, rounds=True).found == found
    assert judge(asked, rounds=False).found == "different"


def test_what_the_original_does_not_repeat_is_no_difference() -> None:
    values = iter(range(100))

    def asked(ask: ShadowTask) -> Shadow:
        kept(ask, 1.0 + 0.1 * (next(values) % 2))
        return shadow(a=str(next(values)))

    verdict = judge(asked, rounds=False)
    assert verdict.found == "equal"
    assert "as two runs of the original do" in verdict.reason
