"""Files of verbs: a certified plan and its page stay, and everything written is listed."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from report import samples
from torchtrim.cli.output import write_files
from torchtrim.records.files import load_plan
from torchtrim.records.plan import Plan, PlanProof, Prediction
from torchtrim.records.report import Result

CERTIFIED = PlanProof(verdict="BITWISE", techniques="", steps=5, inputs=())
FOLDER = Path("torchtrim-out/train")


def plan(certified: PlanProof | None = None) -> Plan:
    return Plan(
        torchtrim="0",
        script="train.py",
        fingerprint={},
        budget_bytes=1,
        predicted=Prediction(peak_bytes=1, step_seconds=1.0),
        certified=certified,
    )


def names() -> set[str]:
    return {path.name for path in FOLDER.iterdir()}


@pytest.fixture(autouse=True)
def optimized(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, bytes]:
    """A folder as `optimize` leaves it."""
    monkeypatch.chdir(tmp_path)
    result = Result(samples.OPTIMIZE, plan=plan(CERTIFIED))
    assert {path.name for path in write_files(result, FOLDER).values()} == names()
    return {path.name: path.read_bytes() for path in FOLDER.iterdir()}


@pytest.mark.parametrize(
    ("report", "prefix"),
    [
        (samples.PLANNING, "untried-"),
        (samples.ESTIMATE, "estimate-"),
        (samples.DIAGNOSE, "diagnose-"),
    ],
)
def test_what_is_less_stays_beside(report, prefix: str, optimized: dict[str, bytes]) -> None:
    made = plan() if report is samples.PLANNING else None
    paths = write_files(Result(report, plan=made), FOLDER, FOLDER / "plan.toml")
    assert all(path.name.startswith(prefix) for path in paths.values())
    assert {name: (FOLDER / name).read_bytes() for name in optimized} == optimized


def test_another_certified_plan_replaces_it() -> None:
    newer = msgspec.structs.replace(plan(CERTIFIED), budget_bytes=2)
    write_files(Result(samples.OPTIMIZE, plan=newer), FOLDER)
    assert load_plan(FOLDER / "plan.toml").budget_bytes == 2


def test_a_named_path_is_written_as_named() -> None:
    paths = write_files(Result(samples.PLANNING, plan=plan()), FOLDER, Path("mine.toml"))
    assert paths["plan"] == Path("mine.toml")


def test_an_untried_plan_may_be_replaced() -> None:
    (FOLDER / "plan.toml").unlink()
    write_files(Result(samples.PLANNING, plan=plan()), FOLDER)
    paths = write_files(Result(samples.PLANNING, plan=plan()), FOLDER)
    assert paths["plan"] == FOLDER / "plan.toml"


def test_the_folder_is_kept_out_of_git(tmp_path: Path) -> None:
    assert Path("torchtrim-out/.gitignore").read_text() == "*\n"
    other = tmp_path / "elsewhere"
    write_files(Result(samples.DIAGNOSE), other)
    assert not list(tmp_path.glob("elsewhere/.gitignore"))
