"""What a verb writes never replaces a certified plan by less, and its page names files from here."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest
from click.testing import CliRunner
from msgspec.structs import replace

from profiles import training_step
from torchtrim.cli.main import torchtrim
from torchtrim.cli.output import followed, write_files
from torchtrim.cli.plans import pins_in
from torchtrim.errors import UsageError
from torchtrim.records.certificate import Certificate
from torchtrim.records.comparison import load_report_or_profile
from torchtrim.records.files import load_plan, save_plan
from torchtrim.records.plan import Plan, PlanProof, Prediction, Technique
from torchtrim.records.report import Report, Result
from torchtrim.workflows.trace import perfetto_trace

FOLDER = Path("torchtrim-out/train")
PROOF = PlanProof(verdict="BITWISE", techniques="", steps=3, inputs=(), complete=True, device="cpu")
CERTIFIED = Plan(
    torchtrim="0.1.0",
    script="train.py",
    fingerprint={},
    budget_bytes=2**30,
    techniques=(Technique(name="recompute", where=("Net.a",)),),
    predicted=Prediction(peak_bytes=7, step_seconds=0.25),
    certified=PROOF,
)
OTHER = replace(CERTIFIED, budget_bytes=2**20, certified=None)


def proven(verdict: str) -> Certificate:
    return Certificate(
        verdict=verdict,  # type: ignore[arg-type]
        compared=(),
        largest_difference=0.0,
        first_difference=None,
        noise=None,
        seeds="script",
        steps=3,
    )


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def written(verb: str, plan: Plan | None = OTHER, **changes: object) -> dict[str, Path]:
    FOLDER.mkdir(parents=True, exist_ok=True)
    save_plan(CERTIFIED, FOLDER / "plan.toml")
    report = Report(
        torchtrim="0", torch="2", verb=verb, device="cpu", script="train.py", steps=3, **changes
    )  # type: ignore[arg-type]
    return write_files(Result(report, training_step(), None, plan), FOLDER, FOLDER / "plan.toml")


@pytest.mark.parametrize(
    ("verb", "changes", "prefix"),
    [
        ("plan", {}, "untried-"),
        ("optimize", {}, "optimize-"),
        ("optimize", {"certificate": proven("BITWISE"), "floor_bytes": 9}, "missed-"),
        ("optimize", {"certificate": proven("NOT EQUAL")}, "unequal-"),
        ("optimize", {"certificate": proven("UNDECIDED")}, "unequal-"),
        ("optimize", {"certificate": proven("BITWISE")}, ""),
    ],
)
def test_less_than_a_certified_plan_has_files_of_its_own(
    verb: str, changes: dict[str, object], prefix: str
) -> None:
    paths = written(verb, **changes)
    assert paths["plan"] == FOLDER / f"{prefix}plan.toml"
    assert paths["page"] == FOLDER / f"{prefix}report.html"
    assert (load_plan(FOLDER / "plan.toml") == CERTIFIED) == bool(prefix)


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"certificate": proven("BITWISE"), "floor_bytes": 9}, "missed-plan.toml"),
        ({"certificate": proven("NOT EQUAL")}, "unequal-plan.toml"),
        ({"certificate": proven("UNDECIDED")}, "unequal-plan.toml"),
        ({"certificate": proven("BITWISE")}, "plan.toml"),
    ],
)
def test_in_a_new_folder_too_a_plan_that_missed_says_so_in_its_name(
    changes: dict[str, object], name: str
) -> None:
    report = Report(
        torchtrim="0", torch="2", verb="optimize", device="cpu", script="a", steps=1, **changes
    )  # type: ignore[arg-type]
    pinned = replace(OTHER, pins={"keep": ("Net.a",)})
    paths = write_files(Result(report, training_step(), None, pinned), FOLDER)
    assert paths["plan"] == FOLDER / name
    assert paths["page"] == FOLDER / "report.html"
    assert pins_in(FOLDER / "plan.toml") == pinned.pins


@pytest.mark.parametrize("verb", ["diagnose", "estimate", "verify"])
def test_other_verbs_leave_the_plan_and_its_page(verb: str) -> None:
    paths = written(verb, None, certificate=proven("BITWISE") if verb == "verify" else None)
    assert {path.name.partition("-")[0] for path in paths.values()} == {verb}


def test_the_page_names_a_profile_that_can_be_exported_from_here() -> None:
    page = written("plan")["page"].read_text()
    said = "torchtrim export torchtrim-out/train/untried-profile.json --perfetto trace.json"
    assert said in page
    assert perfetto_trace(Path(shlex.split(said)[2]))


def test_a_verb_without_a_script_shows_an_example() -> None:
    ended = CliRunner().invoke(torchtrim, ["optimize"])
    assert isinstance(ended.exception, UsageError)
    assert str(ended.exception).endswith("as in: torchtrim optimize train.py --memory 60%")
    ended = CliRunner().invoke(torchtrim, ["diagnose"])
    assert str(ended.exception).endswith("as in: torchtrim diagnose train.py")


def test_the_next_command_is_in_the_report_and_on_the_page() -> None:
    report = Report(torchtrim="0", torch="2", verb="plan", device="cpu", script="train.py", steps=3)
    command = "torchtrim verify train.py --plan torchtrim-out/train/plan.toml"
    paths = write_files(followed(Result(report, training_step()), command), FOLDER)
    assert load_report_or_profile(paths["report"]).next == command
    assert f"<code>{command}</code>" in paths["page"].read_text()
    assert followed(Result(report), None).report.next == ""
