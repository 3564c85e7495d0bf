from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from msgspec.structs import replace

from torchtrim.cli.main import torchtrim
from torchtrim.data.parts import cores_here
from torchtrim.errors import Unsupported
from torchtrim.records.loader import BatchParts, LoaderCost, LoaderSettings, Tuning
from torchtrim.records.report import Result
from torchtrim.records.trial import Request, Trial, TuningRequest
from torchtrim.runner.script import Script
from torchtrim.workflows import tune_loader
from torchtrim.workflows.tune_loader import diff_for, tune_loader_report

SCRIPT = Path(__file__).parents[1] / "scripts" / "slow_loader.py"
LINE = next(
    number
    for number, text in enumerate(SCRIPT.read_text().splitlines(), 1)
    if "= DataLoader(" in text
)
NONE, TWO = LoaderSettings(), LoaderSettings(workers=2, persistent=True)


@functools.cache
def tuned() -> Result:
    return tune_loader_report(Script(str(SCRIPT)), TuningRequest(seconds=20.0))


@pytest.mark.slow
def test_the_steps_of_a_script_try_its_loader() -> None:
    report = tuned().report
    assert report.tuned is not None
    tuning = report.tuned.tuning
    assert tuning.before == NONE == tuning.tried[0].settings
    assert tuning.tried[0].seconds >= 8 * 0.015
    assert tuning.chosen in [one.settings for one in tuning.tried]
    assert tuning.chosen.workers <= cores_here()
    assert (tuning.path, tuning.line) == (str(SCRIPT), LINE)
    assert report.tuned.ready_seconds is not None
    assert report.tuned.ready_seconds < report.tuned.step_seconds


@pytest.mark.slow
def test_the_loader_is_a_finding_with_what_is_slow() -> None:
    (finding,) = (one for one in tuned().report.findings if one.code == "TT301")
    assert (finding.path, finding.line) == (str(SCRIPT), LINE)
    assert "waiting for data" in finding.message


def test_the_verb_says_what_to_change(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tune_loader, "tune_loader_report", lambda *_, **__: tuned())
    done = CliRunner().invoke(torchtrim, ["tune-loader", str(SCRIPT)])
    assert done.exit_code == 0
    assert "a batch" in done.output
    assert tuned().report.tuned is not None
    assert tuned().report.tuned.diff in done.output  # type: ignore[union-attr]


def trial(**given: Any) -> Trial:
    return Trial(request=Request(), **given)


COST = LoaderCost(step_seconds=1.0, ready_seconds=0.1, waited_seconds=0.9)
PARTS = BatchParts(samples=1, bytes=1, reading=0.1, decoding=0.0, collating=0.0)


@pytest.mark.parametrize(
    ("left", "said"),
    [
        (trial(device="emulated a100"), "--device cpu"),
        (trial(), "no batch from a torch.utils.data.DataLoader"),
        (trial(loader=COST), "cannot be read apart"),
        (trial(loader=replace(COST, parts=PARTS)), "ended before a setting"),
    ],
)
def test_what_cannot_be_tuned_says_why(
    left: Trial, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tune_loader, "run_trial", lambda *_, **__: left)
    with pytest.raises(Unsupported, match=said):
        tune_loader_report(Script(str(SCRIPT)), TuningRequest())


def diff(tmp_path: Path, text: str, chosen: LoaderSettings, line: int = 1) -> list[str]:
    path = tmp_path / "train.py"
    path.write_text(text)
    tuning = Tuning(
        before=LoaderSettings(workers=1),
        chosen=chosen,
        before_seconds=1.0,
        after_seconds=0.5,
        cores=2,
        path=str(path),
        line=line,
    )
    lines = diff_for(tuning, tmp_path).splitlines()
    return [one[1:] for one in lines if one.startswith("+") and not one.startswith("+++")]


@pytest.mark.parametrize(
    ("text", "chosen", "wanted"),
    [
        ("x = DataLoader(d)", TWO, "x = DataLoader(d, num_workers=2, persistent_workers=True)"),
        (
            "x = DataLoader(d, num_workers=args.n, persistent_workers=False)",
            TWO,
            "x = DataLoader(d, num_workers=2, persistent_workers=True)",
        ),
        (
            "x = data.DataLoader(d, 8, num_workers=9, prefetch_factor=4, persistent_workers=True)",
            NONE,
            "x = data.DataLoader(d, 8, num_workers=0, prefetch_factor=None, persistent_workers=False)",
        ),
        (
            "x = DataLoader(d)",
            LoaderSettings(workers=1, prefetch=4, pinned=True),
            "x = DataLoader(d, num_workers=1, persistent_workers=False, prefetch_factor=4, "
            "pin_memory=True)",
        ),
        ("x = DataLoader(d, **more)", TWO, None),
        ("x = DataLoader(d, 8, True, None, None, 4)", TWO, None),
        ("x = make(d)", TWO, None),
        ("x = DataLoader(", TWO, None),
        ("x = DataLoader(d)", LoaderSettings(whole=True), None),
    ],
)
def test_the_line_to_change(
    text: str, chosen: LoaderSettings, wanted: str | None, tmp_path: Path
) -> None:
    assert diff(tmp_path, f"{text}\n", chosen) == ([wanted] if wanted else [])
