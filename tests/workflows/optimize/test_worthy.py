"""Which fixes `optimize --memory` proves without --fix, and how many runs a lever and a refusal take."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

import torchtrim
from torchtrim.records.trial import Request, Trial
from torchtrim.runner import trials
from torchtrim.runner.trials import run_once
from torchtrim.workflows import fix_attempt
from torchtrim.workflows.fix_attempt import unworthy
from torchtrim.workflows.optimize.report import optimize_report
from torchtrim.workflows.optimize.trials import measured_names

SCRIPT = """
import torch
from torch import nn

device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)
model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(6))).to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
total = 0.0
for _ in range(8):
    loss = model(torch.randn(256, 64, device=device)).relu().square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    total += loss.item()
"""


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> torchtrim.Script:
    path = tmp_path_factory.mktemp("worthy") / "train.py"
    path.write_text(SCRIPT)
    return torchtrim.Script(str(path), timeout=120)


@pytest.fixture(scope="module")
def original(script: torchtrim.Script) -> Trial:
    return run_once(script, Request(steps=3), "original", lambda _: None)


def with_times(trial: Trial, *seconds: float) -> Trial:
    first = trial.request.warmup + 1
    timed = [
        replace(step, seconds=one) for step, one in zip(trial.steps[first:], seconds, strict=True)
    ]
    return replace(trial, steps=[*trial.steps[:first], *timed])


def test_syncs_within_the_spread_of_a_step_are_counted_and_named(
    script: torchtrim.Script, original: Trial
) -> None:
    said = unworthy(with_times(original, 0.5, 1.0, 1.5), script.project)
    assert said.startswith("1 sync costs ")
    assert "step (modelled on A100), and steps differ by +- 50" in said
    assert said.endswith("not worth proving a fix; --fix does")


@pytest.mark.parametrize("least", [0.0, 1.0])
def test_syncs_above_the_spread_and_a_share_of_the_step_are_worth_a_proof(
    script: torchtrim.Script, original: Trial, monkeypatch: pytest.MonkeyPatch, least: float
) -> None:
    monkeypatch.setattr(fix_attempt, "_WORTHY", least)
    said = unworthy(with_times(original, 1.0, 1.0, 1.0), script.project)
    assert said.endswith(
        "step (modelled on A100): not worth proving a fix; --fix does" * bool(least)
    )
    assert bool(said) == bool(least)


def test_without_syncs_or_a_profile_there_is_nothing_to_say(
    script: torchtrim.Script, original: Trial
) -> None:
    assert original.profile is not None
    none = replace(original, profile=replace(original.profile, syncs=[]))
    assert unworthy(none, script.project) == ""
    assert unworthy(replace(original, profile=None), script.project) == ""


def test_measured_syncs_are_compared_on_their_device(
    script: torchtrim.Script, original: Trial
) -> None:
    profile = original.profile
    assert profile is not None
    real = replace(profile, device="cuda", step_seconds=1.0)
    cheap, dear, unknown = (
        replace(real, syncs=[replace(sync, seconds=seconds) for sync in profile.syncs])
        for seconds in (1e-4, 0.4, None)
    )
    slow = with_times(original, 0.9, 1.0, 1.1)
    assert "100 us of a 1.00 s step (measured)" in unworthy(
        replace(slow, profile=cheap), script.project
    )
    assert unworthy(replace(slow, profile=dear), script.project) == ""
    assert unworthy(replace(slow, profile=unknown), script.project) == ""


@pytest.mark.parametrize(("times", "runs"), [((0.5, 1.0, 1.5), 2), ((1.0, 1.0, 1.0), 4)])
def test_fixes_run_only_if_they_are_worth_it(
    script: torchtrim.Script,
    monkeypatch: pytest.MonkeyPatch,
    times: tuple[float, ...],
    runs: int,
) -> None:
    run_script, made = trials._run_script, list[Request]()

    def counted(script: Any, request: Any, folder: Any, progress: Any) -> Trial:
        made.append(request)
        trial = run_script(script, request, folder, progress)
        return trial if len(made) > 1 else with_times(trial, *times)

    monkeypatch.setattr(trials, "_run_script", counted)
    monkeypatch.setattr(fix_attempt, "_WORTHY", 0.0)
    report = optimize_report(script, "90%", Request(steps=3), fixes=True).report
    assert report.floor_bytes is None
    assert report.certificate is not None
    assert report.certificate.verdict == "BITWISE"
    assert (report.fixes is None) == (runs == 2)
    assert any("not worth proving a fix" in note for note in report.notes) == (runs == 2)
    assert len(made) == runs if runs == 2 else len(made) >= runs


@pytest.mark.slow
def test_levers_run_fewer_steps_than_what_is_compared(
    script: torchtrim.Script, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_script, made = trials._run_script, list[Request]()

    def counted(script: Any, request: Any, folder: Any, progress: Any) -> Trial:
        made.append(request)
        return run_script(script, request, folder, progress)

    monkeypatch.setattr(trials, "_run_script", counted)
    found = optimize_report(script, "1%", Request(steps=3)).report
    assert found.floor_bytes is not None
    assert made[0].steps == 3
    compared = [one for one in made if one.plan is not None and one.steps == 3]
    levers = [one for one in made if one.steps == 1]
    assert compared
    assert levers
    names = {unit.name for one in levers if one.plan is not None for unit in one.plan.techniques}
    assert names <= {*measured_names()}
