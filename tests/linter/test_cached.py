"""Findings are kept while nothing that they rest on changes."""

from __future__ import annotations

from pathlib import Path

import pytest

from torchtrim.linter import cached
from torchtrim.linter.files import Linted, Selected, lint_files

LOSSES = "import torch\ndef loss(x):\n    return torch.relu(x).sum()\n"
USE = "import torch\nfrom losses import loss\ndef f(x):\n    return float(loss(x))\n"


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(cached.caches, "folder", lambda: tmp_path / "cache")
    home = tmp_path / "project"
    home.mkdir()
    (home / "losses.py").write_text(LOSSES)
    (home / "train.py").write_text(USE)
    (home / "other.py").write_text("import torch\nx = torch.ones(3).cuda().item()\n")
    return home


def run(home: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[list[Linted], list[str]]:
    """What is found, and the names of the files that were read."""
    read: list[str] = []

    def counted(files: list[str], selected: Selected) -> list[Linted]:
        read.extend(Path(file).name for file in files)
        return lint_files(files, selected)

    monkeypatch.setattr(cached, "lint_files", counted)
    files = sorted(map(str, home.glob("*.py")))
    return cached.lint_cached(files, Selected(), home), read


def test_what_has_not_changed_is_not_read_again(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, read = run(project, monkeypatch)
    assert read == ["losses.py", "other.py", "train.py"]
    again, read = run(project, monkeypatch)
    assert read == []
    assert [one.findings for one in again] == [one.findings for one in first]
    assert sum(len(one.findings) for one in first) == 3


def test_a_file_is_read_again_with_one_that_it_calls(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(project, monkeypatch)
    (project / "losses.py").write_text("import torch\ndef loss(x):\n    return 3\n")
    found, read = run(project, monkeypatch)
    assert read == ["losses.py", "train.py"]
    assert [len(one.findings) for one in found] == [0, 2, 0]


def test_errors_are_not_kept_and_damage_is_no_harm(
    project: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (project / "other.py").write_text("import torch\ndef (")
    for _ in range(2):
        found, read = run(project, monkeypatch)
        assert "other.py" in read
        assert found[1].error
    for file in (tmp_path / "cache").rglob("*.json"):
        file.write_bytes(file.read_bytes()[:-9])
    assert len(run(project, monkeypatch)[1]) == 3
    monkeypatch.setattr(cached.caches, "folder", lambda: tmp_path / "project" / "train.py")
    assert len(run(project, monkeypatch)[0]) == 3
