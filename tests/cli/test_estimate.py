"""`torchtrim estimate`: the report, its exit codes, and that a mistake is told."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from torchtrim import UsageError
from torchtrim.cli.main import torchtrim

SCRIPT = str(Path(__file__).parent.parent / "certify" / "scripts" / "plain.py")


def run(folder: Path, *options: str) -> Result:
    words = ["estimate", SCRIPT, "--out", str(folder), *options]
    return CliRunner().invoke(torchtrim, words, standalone_mode=False)


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("estimate")
    result = run(folder, "--json", "--max-batch", "250KB")
    assert result.return_value is None or result.exit_code in (0, 1)
    assert (folder / "report.html").is_file()
    assert (folder / "profile.json").is_file()
    return json.loads(result.stdout)


def test_the_report(report: Any) -> None:
    found = report["estimated"]
    assert report["verb"] == "estimate"
    assert report["original"]["step_seconds"] == 0
    assert found["optimizer_bytes"] >= 2 * found["parameter_bytes"] == 2 * found["gradient_bytes"]
    assert sum(one["bytes"] for one in found["modules"]) == report["original"]["peak_bytes"]
    assert all(finding["price_ms"] is None for finding in report["findings"])


def test_the_largest_batch(report: Any) -> None:
    (growth,) = report["estimated"]["growth"]
    assert growth["now"] == 64
    assert 2 <= growth["largest"] < 256
    assert growth["peak_bytes"] <= 250_000 < growth["next_bytes"]


def test_it_does_not_fit(tmp_path: Path) -> None:
    result = run(tmp_path, "--fits", "10KiB")
    assert result.return_value == 1
    assert "BUDGET MISSED" in result.stdout
    assert "parameters" in result.stdout


def test_a_gpu_is_named(tmp_path: Path) -> None:
    result = run(tmp_path, "--device", "cuda")
    assert isinstance(result.exception, UsageError)
    assert "--device h100" in str(result.exception)


def test_an_amount_that_is_none(tmp_path: Path) -> None:
    assert isinstance(run(tmp_path, "--fits", "much").exception, UsageError)
