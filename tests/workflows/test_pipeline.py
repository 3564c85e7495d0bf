"""Pipelines of scripts: certified in two links, in real processes."""

from __future__ import annotations

import functools
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from torchtrim import __version__
from torchtrim.api import Script
from torchtrim.errors import ApplyFailed, ScriptFailed, UsageError
from torchtrim.pipelines.orders import order_of
from torchtrim.planner.stages.chain import ChainReader
from torchtrim.planner.stages.choose import PipelineChoice, PipelineSettings, choose
from torchtrim.planner.stages.timing import step_rise
from torchtrim.records.certificate import Certificate
from torchtrim.records.files import save_plan
from torchtrim.records.pipeline import SCHEDULES, Pipeline, Schedule
from torchtrim.records.plan import Plan, Prediction
from torchtrim.records.trial import Request
from torchtrim.runner.planned_script import run_planned
from torchtrim.workflows.optimize.fitting import Fitting
from torchtrim.workflows.pipeline import Runs, clocked, first_difference, verify_pipeline

SCRIPT = Path(__file__).parents[1] / "scripts/staged.py"
TWO, FOUR = ("blocks.2",), ("blocks.1", "blocks.2", "blocks.3")


def script(*args: str) -> Script:
    return Script(str(SCRIPT), args, device="cpu", timeout=300.0)


def plan(cuts: tuple[str, ...], schedule: Schedule, ranks: int, batches: int = 4) -> Plan:
    pipeline = Pipeline(
        root="Model", cuts=cuts, schedule=schedule, ranks=ranks, microbatches=batches
    )
    return planned(pipeline)


def planned(pipeline: Pipeline) -> Plan:
    return Plan(
        torchtrim=__version__,
        script="staged.py",
        fingerprint={},
        budget_bytes=2**30,
        predicted=Prediction(peak_bytes=0, step_seconds=0.0),
        pipeline=pipeline,
    )


@functools.cache
def certified(schedule: Schedule, ranks: int, stages: int, *args: str) -> Certificate:
    cuts = {2: TWO, 4: FOUR}[stages]
    result = verify_pipeline(script(*args), plan(cuts, schedule, ranks), Request(steps=2))
    assert result.report.certificate is not None
    return result.report.certificate


@pytest.mark.slow
def test_the_certificate_has_two_links() -> None:
    found = certified("Interleaved1F1B", 2, 4)
    assert found.verdict in ("ROUNDING", "BITWISE")
    assert "in the order of Interleaved1F1B" in found.reason or "bit for bit" in found.reason
    assert found.reason.endswith("and that equals the pipeline, bit for bit")
    assert found.compared[0] == "27 gradients x 2 steps"
    assert found.largest_difference is not None
    assert found.largest_difference < 1e-4


@pytest.mark.slow
def test_a_model_that_mixes_samples_is_not_equal() -> None:
    found = Runs.links_of_sums(script("--wrong"), plan(TWO, "GPipe", 2), 1)
    assert found[0] == "NOT EQUAL"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("schedule", "ranks"),
    [(one, 2) for one in SCHEDULES if one not in ("GPipe", "1F1B")] + [("GPipe", 4), ("1F1B", 4)],
)
def test_gradients_are_those_of_accumulation_bit_for_bit(schedule: Schedule, ranks: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        runs = Runs(script(), plan(FOUR, schedule, ranks), 3, Path(folder), lambda _: None)
        assert first_difference(runs.run("in order"), runs.run("pipeline")) == ""


def chosen(schedule: Schedule, ranks: int) -> PipelineChoice:
    """The cut if all operators took as long, so that it is the same on a loaded machine."""
    return chosen_of(PipelineSettings(ranks, 1, (schedule,), (4,)))


def chosen_of(ways: PipelineSettings) -> PipelineChoice:
    fitting = Fitting(script(), Request(), lambda _: None)
    trial = fitting.observe()
    profile = fitting.planner(trial).profile
    reader = ChainReader(profile, trial.seconds, [1e-5] * len(profile.operators))
    return choose(functools.cache(reader.chain), ways, None, order_of)


@pytest.mark.slow
def test_stages_are_clocked_and_what_does_not_run_in_stages_says_why(tmp_path: Path) -> None:
    def runs(folder: Path, *args: str) -> Runs:
        folder.mkdir()
        return Runs(script(*args), planned(before.pipeline), 1, folder, lambda _: None)

    ways = PipelineSettings(2, 1, ("1F1B", "ZBVZeroBubble"), (2, 4))
    before = chosen_of(ways)
    found, note = clocked(runs(tmp_path / "runs"), before, ways)
    assert not note
    assert len(found.shortlist) == len(before.shortlist) == 4
    assert {one.schedule for one in found.others} == {"1F1B", "ZBVZeroBubble"}
    assert all(stage.forward != 1e-5 for one in found.others for stage in one.stages)
    same, note = clocked(runs(tmp_path / "refused", "--sums"), before, ways)
    assert same is before
    assert "the stages were not run" in note
    assert "mean" in note


def most_off(schedule: Schedule, ranks: int) -> float:
    """By how much the simulated rise of a step is off the measured one, on the worst rank."""
    found = chosen(schedule, ranks)
    with tempfile.TemporaryDirectory() as folder:
        runs = Runs(script(), planned(found.pipeline), 4, Path(folder), lambda _: None)
        ran = runs.run("pipeline", measured=True)
    rises = [step_rise(found.best.stages, found.best.order, rank) for rank in range(ranks)]
    measured = [trial.peak_bytes for trial, _ in ran.trials]
    return max(abs(one / other - 1) for one, other in zip(rises, measured, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_the_simulated_peak_is_the_measured_one(schedule: Schedule) -> None:
    assert most_off(schedule, 2) <= 0.05


def test_a_rank_that_fails_ends_all_with_its_reason() -> None:
    with tempfile.TemporaryDirectory() as folder:
        runs = Runs(script(), plan(("blocks.7",), "GPipe", 2), 1, Path(folder), lambda _: None)
        with pytest.raises((ApplyFailed, ScriptFailed), match="no such module"):
            runs.run("pipeline")


@pytest.mark.slow
def test_a_rank_that_dies_ends_all_and_is_named() -> None:
    with tempfile.TemporaryDirectory() as folder:
        runs = Runs(script("--dies"), plan(TWO, "1F1B", 2), 3, Path(folder), lambda _: None)
        with pytest.raises(ScriptFailed, match=r"rank \d of 2: .*process died with 9"):
            runs.run("pipeline")


def test_a_live_model_and_another_device_are_refused() -> None:
    one = plan(TWO, "GPipe", 2)
    with pytest.raises(UsageError, match="verify its script"):
        verify_pipeline(object(), one, Request())  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="gloo"):
        verify_pipeline(script()._replace(device="emulated"), one, Request())


def test_a_plan_for_several_processes_says_how_to_start_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with pytest.raises(UsageError, match="torchrun --nproc-per-node 2 -m torchtrim run"):
        run_planned(script(), plan(TWO, "GPipe", 2))


@pytest.mark.slow
def test_torchrun_runs_the_script_in_stages(tmp_path: Path) -> None:
    """Each rank prints what the other does, and has a whole state_dict at the end."""
    path = tmp_path / "plan.toml"
    save_plan(plan(FOUR, "Interleaved1F1B", 2), path)
    words = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    command = (sys.executable, *words, "-m", "torchtrim", "run", str(SCRIPT), "--plan", str(path))
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    lines = sorted(done.stdout.splitlines())
    losses = [line for line in lines if line.startswith("step ")]
    assert len(losses) == 16
    assert losses[::2] == losses[1::2]
    assert lines.count("saved True") == 2
