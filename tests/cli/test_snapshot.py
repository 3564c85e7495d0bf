"""`torchtrim snapshot` on the command line."""

from __future__ import annotations

import json
import pickle
from pathlib import Path

import pytest
from click.testing import CliRunner
from tests.snapshots import Writer, leave_holes

from torchtrim.cli.verbs.snapshot import command


@pytest.fixture
def file(tmp_path: Path) -> Path:
    writer = Writer()
    leave_holes(writer)
    path = tmp_path / "snapshot.pickle"
    path.write_bytes(pickle.dumps(writer.dumped()))
    return path


def test_a_snapshot_is_explained(file: Path) -> None:
    result = CliRunner().invoke(command, [str(file)])
    assert result.exit_code == 0
    for said in (
        "Peak on device 0: 132 MiB allocated",
        "me/train.py:3 step",
        "8 of 8 blocks lie at the GPU's address",
        "export PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True",
    ):
        assert said in result.output.replace("\n          ", " ")


def test_json_and_a_page(file: Path, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    result = CliRunner().invoke(command, [str(file), "--json", "--page", str(page)])
    report = json.loads(result.stdout)
    assert report["devices"][0]["evidence"]["same"] == 8
    text = page.read_text()
    assert "me/train.py:3 step" in text
    assert text.count("<svg") == 1
    assert "http" not in text.replace("http-equiv", "")


def test_a_setting_of_ones_own(file: Path) -> None:
    conf = "max_split_size_mb:25"
    result = CliRunner().invoke(command, [str(file), "--setting", conf, "--json"])
    assert conf in [one["conf"] for one in json.loads(result.stdout)["devices"][0]["tried"]]
