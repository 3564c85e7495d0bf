"""Writes of source that are killed, undone, or come from someone else."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest

from torchtrim.errors import UnreadableInput, UsageError
from torchtrim.records.source_write import FileWrite, SourceWrite
from torchtrim.rewriter import journal
from torchtrim.rewriter.files import settle_killed, undo_sources, write_sources

OLD = {"a.py": "a = 1\n", "b.py": "b = 1\n", "c.py": "c = 1\n"}
NEW = {name: text.replace("1", "2") for name, text in OLD.items()}
_CHANGES = ("open", "os.rename", "os.remove", "os.chmod", "os.mkdir")


@pytest.fixture
def project(tmp_path: Path) -> Path:
    for name, text in OLD.items():
        (tmp_path / name).write_text(text)
    return tmp_path


def texts(project: Path) -> dict[str, str]:
    return {name: (project / name).read_text() for name in OLD}


def write(project: Path) -> None:
    absolute = [{str(project / n): text for n, text in texts.items()} for texts in (NEW, OLD)]
    write_sources(*absolute, project)


def is_change(event: str, _: tuple[object, ...]) -> bool:
    return event in _CHANGES


def is_replaced_source(event: str, args: tuple[object, ...]) -> bool:
    return event == "os.rename" and str(args[1]).endswith(".py")


def killed_at(
    number: int, work: Callable[[], object], counts: Callable[..., bool] = is_change
) -> bool:
    """Do the work in a process that dies, as by SIGKILL, before its Nth use of a file; False if it ends."""
    child = os.fork()
    if child == 0:
        left = [number]

        def hook(event: str, args: tuple[object, ...]) -> None:
            if counts(event, args):
                left[0] -= 1
                if left[0] < 0:
                    os._exit(137)

        sys.addaudithook(hook)
        try:
            work()
        finally:
            os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 137


def every_kill(work: Callable[[], object]) -> Iterator[int]:
    number = 0
    while killed_at(number, work):
        yield number
        number += 1
    assert number > 20


def debris(project: Path) -> set[str]:
    own = {one.name for one in (project / ".torchtrim").glob("*")} if project.exists() else set()
    return ({one.name for one in project.iterdir()} | own) - {
        *OLD,
        ".torchtrim",
        ".gitignore",
        "written.json",
    }


def test_killed_at_every_point_a_write_is_whole_or_not_at_all(project: Path) -> None:
    outcomes = set()
    for _ in every_kill(lambda: write(project)):
        notes = settle_killed(project / "a.py")
        now = texts(project)
        assert now in (OLD, NEW)
        assert not debris(project)
        if now == NEW:
            assert undo_sources(project).restored
        assert texts(project) == OLD
        outcomes.add((now == NEW, notes[0].split("; ")[1].split(":")[0] if notes else ""))
    assert outcomes >= {(False, ""), (False, "as before it are again"), (True, "it is complete")}


def test_killed_at_every_point_an_undo_is_whole_or_not_at_all(project: Path) -> None:
    write(project)
    for _ in every_kill(lambda: undo_sources(project)):
        settle_killed(project)
        now = texts(project)
        assert now in (OLD, NEW)
        assert not debris(project)
        if now == NEW:
            undo_sources(project)
            assert texts(project) == OLD
        write(project)


def test_killed_while_it_restores_it_restores_at_the_next_start(project: Path) -> None:
    assert killed_at(2, lambda: write(project), is_replaced_source)
    assert texts(project) == {**NEW, "c.py": OLD["c.py"]}
    assert killed_at(1, lambda: settle_killed(project), is_replaced_source)
    assert texts(project) == {**OLD, "b.py": NEW["b.py"]}
    assert "half-way" in settle_killed(project)[0]
    assert texts(project) == OLD
    assert not debris(project)


@pytest.mark.parametrize("number", range(1, 4))
def test_an_error_at_any_file_leaves_none_written(
    project: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    real, left = Path.replace, [number]

    def replace(path: Path, target: Path) -> Path:
        if target.suffix == ".py":
            left[0] -= 1
            if left[0] == 0:
                raise OSError(28, "No space left on device", str(target))
        return real(path, target)

    monkeypatch.setattr(Path, "replace", replace)
    with pytest.raises(UsageError, match=r"No space left on device\. Nothing was written"):
        write(project)
    assert texts(project) == OLD
    assert not debris(project)


@pytest.mark.parametrize("number", range(1, 4))
def test_interrupted_at_any_file_none_is_written(
    project: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    real, left = Path.replace, [number]

    def replace(path: Path, target: Path) -> Path:
        found = real(path, target)
        if target.suffix == ".py":
            left[0] -= 1
            if left[0] == 0:
                raise KeyboardInterrupt
        return found

    monkeypatch.setattr(Path, "replace", replace)
    with pytest.raises(KeyboardInterrupt):
        write(project)
    assert texts(project) in (OLD, NEW)
    assert (texts(project) == NEW) == (number == 3)
    assert not debris(project)


def test_undo_takes_out_the_last_write_once(project: Path) -> None:
    write(project)
    undone = undo_sources(project / "b.py")
    assert {path.name for path in undone.restored} == set(OLD)
    assert texts(project) == OLD
    with pytest.raises(UsageError, match="nothing to undo"):
        undo_sources(project)


def test_a_file_edited_since_is_refused_with_its_diff_and_the_rest_undone(project: Path) -> None:
    write(project)
    (project / "b.py").write_text("b = 2\nmine = 3\n")
    undone = undo_sources(project)
    assert texts(project) == {**OLD, "b.py": "b = 2\nmine = 3\n"}
    ((path, reason, diff),) = undone.refused
    assert (path.name, "edited since" in reason) == ("b.py", True)
    assert "-b = 2\n+b = 1\n" in diff
    assert not undo_sources(project).restored
    (project / "b.py").write_text(NEW["b.py"])
    assert [path.name for path in undo_sources(project).restored] == ["b.py"]
    assert texts(project) == OLD


def test_a_killed_write_whose_file_was_edited_leaves_the_edit(project: Path) -> None:
    assert killed_at(2, lambda: write(project), is_replaced_source)
    (project / "a.py").write_text("a = 'mine'\n")
    settle_killed(project)
    assert texts(project) == {**OLD, "a.py": "a = 'mine'\n"}


def test_modes_and_bytes_come_back(tmp_path: Path) -> None:
    path = tmp_path / "a.py"
    path.write_bytes(b"\xef\xbb\xbfx = 1\r\n")
    path.chmod(0o750)
    write_sources({str(path): "x = 2\r\n"}, {str(path): "x = 1\r\n"}, tmp_path)
    undo_sources(path)
    assert path.read_bytes() == b"\xef\xbb\xbfx = 1\r\n"
    assert path.stat().st_mode & 0o777 == 0o750


@pytest.mark.parametrize("named", ["../outside.py", ".git/config", "link.py"])
def test_a_journal_that_names_what_is_no_source_of_the_project_is_refused(
    tmp_path: Path, named: str
) -> None:
    project = tmp_path / "project"
    (project / ".git").mkdir(parents=True)
    outside = tmp_path / "outside.py"
    for path in (outside, project / ".git/config"):
        path.write_text("x = 2\n")
    (project / "link.py").symlink_to(outside)
    one = FileWrite(path=named, before=b"evil\n", after=b"x = 2\n")
    (project / ".torchtrim").mkdir()
    data = msgspec.json.encode(SourceWrite(key="k", when="", files=(one,)))
    for name, work in (("written.json", undo_sources), ("writing.json", settle_killed)):
        (project / ".torchtrim" / name).write_bytes(data)
        with pytest.raises(UnreadableInput, match="no source of"):
            work(project)
        (project / ".torchtrim" / name).unlink()
    assert outside.read_text() == (project / ".git/config").read_text() == "x = 2\n"


@pytest.mark.parametrize("data", [b"", b"{", b"[]", b"{}", b"\xff", b'{"schema_version": 9}'])
def test_a_damaged_journal_is_an_error_that_names_it(project: Path, data: bytes) -> None:
    write(project)
    (project / ".torchtrim/written.json").write_bytes(data)
    with pytest.raises(UnreadableInput, match=r"written\.json"):
        undo_sources(project)


def test_the_newest_write_above_is_undone(project: Path) -> None:
    inner = project / "inner"
    inner.mkdir()
    (inner / "d.py").write_text("d = 1\n")
    write_sources({str(inner / "d.py"): "d = 2\n"}, {str(inner / "d.py"): "d = 1\n"}, inner)
    write(project)
    undo_sources(inner)
    assert texts(project) == OLD
    undo_sources(inner)
    assert (inner / "d.py").read_text() == "d = 1\n"


def test_another_users_journal_is_not_read(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(project)
    monkeypatch.setattr(journal, "_is_own", lambda _: False)
    with pytest.raises(UsageError, match="nothing to undo"):
        undo_sources(project)


def test_an_error_after_the_last_file_does_not_deny_the_write(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    complete, left = journal._complete, [OSError(28, "No space left on device")]

    def full_once(*words: object) -> None:
        if left:
            raise left.pop()
        complete(*words)

    monkeypatch.setattr(journal, "_complete", full_once)
    write(project)
    assert texts(project) == NEW
    assert undo_sources(project).restored
