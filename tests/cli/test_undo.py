"""What is said of source that was written, however the run ends; and `torchtrim undo`."""

from __future__ import annotations

import os
import random
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import NoReturn

import pytest

from torchtrim.cli.main import CRASHED, main
from torchtrim.errors import ScriptFailed
from torchtrim.records.trial import Request, Trial
from torchtrim.workflows import fix
from torchtrim.workflows.optimize import report as fitted

OLD, NEW = "x = 1\n", "x = 2\n"


class Run:
    """What a run of the command line gave."""

    def __init__(self, code: object, out: str, err: str) -> None:
        self.code, self.out, self.err = code, out, err


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(OLD)
    path = str(tmp_path / "train.py")

    class Fixing:
        def __init__(self, *_: object, **__: object) -> None: ...

        def fix(self) -> fix.Fixed:
            return fix.Fixed(Trial(request=Request()), texts={path: NEW}, before={path: OLD})

    monkeypatch.setattr(fix, "Fixing", Fixing)

    def run(*words: str) -> Run:
        monkeypatch.setattr(sys, "argv", ["torchtrim", *words])
        with pytest.raises(SystemExit) as ended:
            main()
        return Run(ended.value.code, *capfd.readouterr())

    return run


def ends_with(error: BaseException):
    def work(*_: object, **__: object) -> NoReturn:
        raise error

    return work


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (KeyboardInterrupt(), 130),
        (ScriptFailed("the script broke"), 3),
        (SystemExit(143), 143),
        (RuntimeError("ours"), CRASHED),
    ],
)
def test_what_was_written_is_said_whatever_comes_afterwards(
    run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException, code: int
) -> None:
    monkeypatch.setattr(fitted, "optimize_report", ends_with(error))
    words = ("optimize", "train.py", "--fix", "--memory", "60%")
    ended = run(*words)
    assert ended.code == code
    assert "source written: train.py. Undo: " in ended.err
    assert (tmp_path / "train.py").read_text() == NEW
    assert "-x = 1\n+x = 2\n" in (tmp_path / "torchtrim-out/train/fixes.diff").read_text()
    undone = run("undo", "train.py")
    assert undone.code == 0
    assert undone.err.endswith(f"restored: {tmp_path / 'train.py'}\n")
    assert (tmp_path / "train.py").read_text() == OLD


def test_interrupted_before_anything_is_written_nothing_is_said_to_be(
    run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fix, "fixes_of", ends_with(KeyboardInterrupt()))
    ended = run("optimize", "train.py", "--fix")
    assert ended.code == 130
    assert ended.err.strip().startswith("interrupted in phase 1 of 2 (importing torch)")
    assert ended.err.endswith("nothing was written\n")


def test_the_diff_is_there_before_the_source_is_written(
    run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []

    def write(*_: object) -> None:
        seen.append((tmp_path / "torchtrim-out/train/fixes.diff").read_text())
        raise KeyboardInterrupt

    monkeypatch.setattr(fix, "write_sources", write)
    run("optimize", "train.py", "--fix")
    assert "-x = 1\n+x = 2\n" in seen[0]
    assert (tmp_path / "train.py").read_text() == OLD


def test_what_was_edited_since_is_not_undone(run, tmp_path: Path) -> None:
    run("optimize", "train.py", "--fix")
    (tmp_path / "train.py").write_text("x = 3\n")
    ended = run("undo")
    assert ended.code == 1
    assert "it was edited since" in ended.err
    assert "-x = 2\n+x = 1\n" in ended.out
    assert (tmp_path / "train.py").read_text() == "x = 3\n"


def test_where_nothing_was_written_there_is_nothing_to_undo(run) -> None:
    ended = run("undo")
    assert ended.code == 2
    assert "nothing to undo" in ended.err


def test_the_next_start_says_that_a_write_was_killed(run, tmp_path: Path) -> None:
    run("optimize", "train.py", "--fix")
    kept = tmp_path / ".torchtrim"
    (kept / "written.json").rename(kept / "writing.json")
    ended = run("lint", "train.py")
    assert "note: an earlier write of source was interrupted" in ended.err
    assert run("undo").code == 0
    assert (tmp_path / "train.py").read_text() == OLD


MODEL = """import torch


def f(x: torch.Tensor, m: torch.Tensor):
    x[m.nonzero(as_tuple=True)] = 0
    return x
"""


@pytest.mark.slow
def test_lint_killed_at_random_moments_loses_nothing(tmp_path: Path) -> None:
    """A tree is fixed by a real process that is killed; the next start leaves all as it was or all fixed."""
    rng, outcomes = random.Random(0), set()
    for _ in range(40):
        shutil.rmtree(tmp_path / "tree", ignore_errors=True)
        (tmp_path / "tree").mkdir()
        paths = [tmp_path / "tree" / f"m{number}.py" for number in range(20)]
        for path in paths:
            path.write_text(MODEL)
        words = ["-m", "torchtrim", "lint", "tree", "--unsafe-fixes"]
        process = subprocess.Popen(
            [sys.executable, *words],
            cwd=tmp_path,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "COLUMNS": "80"},
        )
        begun = time.monotonic()
        while process.poll() is None and not (tmp_path / "tree/.torchtrim").exists():
            if time.monotonic() - begun > 60:
                break
            time.sleep(0.0005)
        time.sleep(rng.uniform(0, 0.01))
        process.send_signal(signal.SIGKILL)
        process.wait()
        subprocess.run(
            [sys.executable, "-m", "torchtrim", "lint", "tree"],
            cwd=tmp_path,
            capture_output=True,
            check=False,
        )
        texts = {path.read_text() for path in paths}
        assert len(texts) == 1
        outcomes.add(texts == {MODEL})
        left = {one.name for one in (tmp_path / "tree").iterdir()}
        assert left <= {".torchtrim", *(path.name for path in paths)}
    assert outcomes


@pytest.mark.parametrize(
    "name", ["-dash.py", "--fix.py", "a b.py", "it's.py", "$(touch x).py", "-a 'b\".py"]
)
def test_the_command_that_undoes_works_as_it_is_printed(run, tmp_path: Path, name: str) -> None:
    (tmp_path / "pyproject.toml").write_text("")
    source = "import torch\ndef f(x: torch.Tensor, m: torch.Tensor):\n    x[m.nonzero(as_tuple=True)] = 0\n"
    (tmp_path / name).write_text(source)
    said = run("lint", "--unsafe-fixes", "--", name).err
    assert (tmp_path / name).read_text() != source
    command = shlex.split(said.partition("Undo: ")[2].partition("\n")[0])
    assert run(*command[command.index("undo") :]).code == 0
    assert (tmp_path / name).read_text() == source
