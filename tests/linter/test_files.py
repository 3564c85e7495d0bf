"""Which files are linted, in which order, and how they are fixed."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest

import torchtrim
from torchtrim.core import caches
from torchtrim.errors import UnreadableInput, UsageError
from torchtrim.linter import files as linter_files
from torchtrim.linter.files import (
    Linted,
    Selected,
    files_of,
    fix_files,
    lint_files,
    project_of,
    write_fixed,
)
from torchtrim.rewriter.files import undo_sources

WAITS = "import torch\n\n\ndef f(x: torch.Tensor, m: torch.Tensor):\n    x[m.nonzero(as_tuple=True)] = 0\n"


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    for name in (
        "b.py",
        "a.py",
        "sub/c.py",
        ".hidden/d.py",
        "env/lib/e.py",
        "__pycache__/f.py",
        "lib/site-packages/g.py",
        "notes.txt",
    ):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(WAITS)
    (tmp_path / "env" / "pyvenv.cfg").touch()
    (tmp_path / "pyproject.toml").touch()
    return tmp_path


def names(files: Iterable[str], base: Path) -> list[str]:
    return [Path(file).relative_to(base).as_posix() for file in files]


def test_a_folder_is_walked_without_what_is_installed_or_hidden(tree: Path) -> None:
    assert names(files_of([tree]), tree) == ["a.py", "b.py", "sub/c.py"]


def test_what_is_named_itself_is_linted_once(tree: Path) -> None:
    given = [tree / "lib/site-packages", tree / "notes.txt", tree / "a.py", tree / "a.py"]
    assert names(files_of(given), tree) == ["a.py", "lib/site-packages/g.py", "notes.txt"]


def test_a_file_with_several_names_is_linted_once(tree: Path) -> None:
    for link, target in {"a2.py": "a.py", "sub2": "sub", "sub/up.py": "../b.py"}.items():
        (tree / link).symlink_to(target)
    (tree / "sub/hard.py").hardlink_to(tree / "a.py")
    files = files_of([tree, tree / "sub2", tree / "a2.py", tree / "sub2/up.py", tree / "b.py"])
    assert names(files, tree) == ["a.py", "b.py", "sub/c.py"]
    assert names(files[str(tree / "a.py")], tree) == ["sub/hard.py"]


def test_links_that_lead_nowhere_stop_no_other_file(tree: Path) -> None:
    links = {"gone.py": "nothing.py", "loop.py": "pool.py", "pool.py": "loop.py", "sub/top": ".."}
    for link, target in {**links, "zero.py": os.devnull}.items():
        (tree / link).symlink_to(target)
    found = linter_files.lint_files(files_of([tree]))
    told = {Path(one.path).name: one.error for one in found if one.error}
    assert set(told) == {"gone.py", "loop.py", "pool.py", Path(os.devnull).name}
    assert "a pipe, a device or a socket" in told[Path(os.devnull).name]
    assert sum(len(one.findings) for one in found) == 3
    for name in ("gone.py", "loop.py"):
        with pytest.raises(UsageError, match="broken symbolic link"):
            files_of([tree / name])


def test_what_is_not_there_is_told(tree: Path) -> None:
    with pytest.raises(UsageError, match=r"gone does not exist"):
        files_of([tree / "gone"])


def test_two_processes_give_what_one_gives(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(30):
        (tree / f"m{number:02}.py").write_text(WAITS.replace("(x:", f"(x{number}, x:"))
    (tree / "broken.py").write_text("import torch\ndef f(:\n")
    (tree / "bytes.py").write_bytes(b"# coding: utf-8\ntorch = '\xff'\n")
    files = files_of([tree])
    alone = linter_files.lint_files(files)
    monkeypatch.setattr(linter_files, "_FEW", 1)
    assert linter_files.lint_files(files) == alone
    assert [one.path for one in alone] == list(files)
    told = {Path(one.path).name: one.error for one in alone if one.error}
    assert set(told) == {"broken.py", "bytes.py"}
    assert sum(len(one.findings) for one in alone) == 33


@pytest.mark.parametrize("codes", [["TT2"], ["E501"], [""], ["TT105"]])
def test_a_code_that_lint_does_not_know_is_told(codes: list[str]) -> None:
    with pytest.raises(UsageError, match="lint has no code that starts with"):
        Selected(codes)


def test_from_python(tree: Path) -> None:
    assert [Path(one.path).name for one in torchtrim.lint(tree)] == ["a.py", "b.py", "c.py"]
    assert torchtrim.lint(tree, select=["TT104"]) == ()
    (tree / "a.py").write_text("import torch\ndef f(:\n")
    with pytest.raises(UnreadableInput, match="not valid Python"):
        torchtrim.lint(tree)


def test_fixing_writes_all_files_and_shows_what_it_did(tree: Path) -> None:
    files = files_of([tree])
    fixed = fix_files(files, Selected(), tree, unsafe=True)
    assert fixed.applied == 3
    assert (tree / "a.py").read_text() == WAITS
    assert fixed.diff(str(tree)).count("+    x[m != 0] = 0") == 3
    assert "--- a/sub/c.py\n+++ b/sub/c.py" in fixed.diff(str(tree))
    write_fixed(fixed, tree)
    assert "x[m != 0] = 0" in (tree / "sub/c.py").read_text()
    assert not fix_files(files, Selected(), tree, unsafe=True).texts


def test_hard_links_are_fixed_once_and_stay_one_file(tree: Path) -> None:
    (tree / "hard.py").hardlink_to(tree / "a.py")
    fixed = fix_files(files_of([tree]), Selected(), tree, unsafe=True)
    assert fixed.applied == 3
    write_fixed(fixed, tree)
    assert (tree / "hard.py").samefile(tree / "a.py")
    assert "x[m != 0] = 0" in (tree / "hard.py").read_text()
    undo_sources(tree)
    assert (tree / "hard.py").samefile(tree / "a.py")
    assert (tree / "hard.py").read_text() == WAITS


def test_without_being_asked_for_nothing_unsafe_is_made(tree: Path) -> None:
    assert not fix_files(files_of([tree]), Selected(), tree).texts


def test_what_must_not_be_edited_is_told_and_the_rest_is_fixed(tree: Path) -> None:
    (tree / "a.py").write_text("# @generated by a tool\n" + WAITS)
    files = files_of([tree, tree / "lib/site-packages"])
    fixed = fix_files(files, Selected(), tree, unsafe=True)
    assert {Path(path).name: why for path, why in fixed.refused.items()} == {
        "a.py": "it is marked as generated",
        "g.py": "it belongs to an installed package",
    }
    assert {Path(path).name for path in fixed.texts} == {"b.py", "c.py"}


def test_a_file_that_changes_meanwhile_stops_the_writing(tree: Path) -> None:
    fixed = fix_files(files_of([tree]), Selected(), tree, unsafe=True)
    (tree / "b.py").write_text(WAITS + "\n# mine\n")
    with pytest.raises(UsageError, match="has changed since it was read"):
        write_fixed(fixed, tree)
    assert (tree / "a.py").read_text() == WAITS


def test_edits_stay_in_the_project_around_what_was_named(tree: Path) -> None:
    assert project_of([tree / "sub"]) == tree
    assert project_of([tree / "sub/c.py", tree / "a.py"]) == tree


@pytest.mark.parametrize("make", [os.mkfifo, lambda path: path.symlink_to("/dev/zero"), Path.mkdir])
def test_what_is_no_file_is_named_and_others_go_on(
    make: Callable[[Path], object], tmp_path: Path
) -> None:
    make(tmp_path / "a.py")
    name = (tmp_path / "a.py").resolve().name
    (tmp_path / "b.py").write_text("import torch\ndef f(x: torch.Tensor):\n    return x.item()\n")
    (tmp_path / "c.py").write_text("from a import b\nimport torch\nb(torch.ones(2)).item()\n")
    linted = linter_files.lint_files(files_of([tmp_path]), Selected())
    errors = [one.error for one in linted if one.error]
    assert all(name in error and "a pipe, a device or a socket" in error for error in errors)
    assert len(errors) == (make is not Path.mkdir)
    assert sum(len(one.findings) for one in linted) >= 1


LOSSES = "import torch\ndef loss(x):\n    return torch.relu(x).sum()\n"
USE = "import torch\nfrom losses import loss\ndef f(x):\n    return float(loss(x))\n"


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(caches, "folder", lambda: tmp_path / "cache")
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

    monkeypatch.setattr(linter_files, "lint_files", counted)
    files = sorted(map(str, home.glob("*.py")))
    return linter_files.lint_cached(files, Selected(), home), read


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
    monkeypatch.setattr(caches, "folder", lambda: tmp_path / "project" / "train.py")
    assert len(run(project, monkeypatch)[0]) == 3
