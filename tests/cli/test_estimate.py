"""`torchtrim estimate`: the report, its exit codes, and that a mistake is told."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from torchtrim import ApplyFailed, UsageError
from torchtrim.cli.main import torchtrim

SCRIPTS = Path(__file__).parent.parent / "scripts"


def run(folder: Path, *options: str, script: str = "plain.py") -> Result:
    words = ["estimate", str(SCRIPTS / script), "--out", str(folder), *options]
    return CliRunner().invoke(torchtrim, words, standalone_mode=False)


def reported(folder: Path, *options: str) -> Any:
    result = run(folder, "--json", *options)
    assert result.return_value is None or result.exit_code in (0, 1)
    assert (folder / "report.html").is_file()
    assert (folder / "profile.json").is_file()
    return json.loads(result.stdout)


def test_the_report(tmp_path: Path) -> None:
    report = reported(tmp_path)
    found = report["estimated"]
    assert report["verb"] == "estimate"
    assert report["original"]["step_seconds"] == 0
    assert found["optimizer_bytes"] >= 2 * found["parameter_bytes"] == 2 * found["gradient_bytes"]
    assert sum(one["bytes"] for one in found["modules"]) == report["original"]["peak_bytes"]
    assert all(finding["price_ms"] is None for finding in report["findings"])


@pytest.mark.slow
def test_the_largest_batch(tmp_path: Path) -> None:
    report = reported(tmp_path, "--max-batch", "250KB")
    (growth,) = report["estimated"]["growth"]
    assert growth["now"] == 64
    assert 2 <= growth["largest"] < 256
    assert growth["peak_bytes"] <= 250_000 < growth["next_bytes"]


def test_it_does_not_fit(tmp_path: Path) -> None:
    result = run(tmp_path, "--fits", "10KiB")
    assert result.return_value == 1
    assert "Does not fit" in result.stdout
    assert "parameters" in result.stdout


def test_a_gpu_is_named(tmp_path: Path) -> None:
    result = run(tmp_path, "--device", "cuda")
    assert isinstance(result.exception, UsageError)
    assert "--device h100" in str(result.exception)


def test_an_amount_that_is_none(tmp_path: Path) -> None:
    assert isinstance(run(tmp_path, "--fits", "much").exception, UsageError)


def test_a_process_of_eight(tmp_path: Path) -> None:
    result = run(tmp_path, "--ranks", "8", "--fsdp", "--fits", "1MiB", script="replicated.py")
    assert result.exit_code == 0
    said = " ".join(result.stdout.split())
    assert "Fits" in said
    assert "the first of 8 ranks, fully_shard on 4 blocks" in said
    assert "gathered" in said
    assert "torchtrim plan" not in said


@pytest.mark.slow
def test_a_script_of_torchruns_as_it_is(tmp_path: Path) -> None:
    result = run(tmp_path, "--ranks", "8", "--json", script="replicated.py")
    found = json.loads(result.stdout)["estimated"]
    assert found["sharded"] == {"ranks": 8, "blocks": [], "options": None}
    assert found["parameter_bytes"] == found["gradient_bytes"] == 4 * (4 * 65 * 64 + 65 * 8)


@pytest.mark.slow
def test_a_script_that_shards_by_itself(tmp_path: Path) -> None:
    report = json.loads(
        run(tmp_path, "--ranks", "8", "--device", "h100", "--json", script="sharded.py").stdout
    )
    weights = 4 * (64 * 64 + 64) * 4 + (64 * 8 + 8) * 4
    assert report["estimated"]["parameter_bytes"] == report["estimated"]["gradient_bytes"]
    assert weights / 4 <= report["estimated"]["parameter_bytes"] <= weights / 4 + 512 * 10
    assert report["original"]["by_kind"]["gathered"] > 0


@pytest.mark.parametrize(
    ("options", "said"),
    [(("--fsdp",), "--ranks 8"), (("--ranks", "8", "--fsdp-offload"), "add --fsdp")],
)
def test_a_sharding_that_is_not_whole(tmp_path: Path, options: tuple[str, ...], said: str) -> None:
    error = run(tmp_path, *options).exception
    assert isinstance(error, UsageError)
    assert said in str(error)


@pytest.mark.slow
def test_what_cannot_be_sharded(tmp_path: Path) -> None:
    error = run(tmp_path, "--ranks", "8", "--fsdp", "--fsdp-blocks", "layers.*").exception
    assert isinstance(error, ApplyFailed)
    assert "no module with parameters matches 'layers.*'" in str(error)
