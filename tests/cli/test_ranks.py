"""`--processes`, and what torchrun says."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import click
import pytest

from torchtrim.cli.main import torchtrim
from torchtrim.cli.options import ranks_asked
from torchtrim.errors import UsageError
from torchtrim.runner.ranks import launch

SCRIPTS = Path(__file__).parent.parent / "scripts"
RANKS = str(SCRIPTS / "ranks.py")


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch):
    """torchrun's variables."""

    def launched(rank: int, world: int = 4, local: int = 4) -> click.Context:
        told = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": local}
        for name, value in told.items():
            monkeypatch.setenv(name, str(value))
        return click.Context(torchtrim)

    return launched


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> click.Context:
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    return click.Context(torchtrim)


@pytest.mark.parametrize(("asked", "ranks"), [(None, 1), (1, 1), (3, 3)])
def test_without_torchrun_as_many_as_are_asked_for(
    alone: click.Context, asked: int | None, ranks: int
) -> None:
    assert ranks_asked(alone, asked) == ranks


@pytest.mark.parametrize("asked", [None, 4])
def test_torchruns_first_rank_sees_to_all(launched, asked: int | None) -> None:
    assert ranks_asked(launched(0), asked) == 4


def test_its_other_ranks_are_done(launched) -> None:
    with pytest.raises(click.exceptions.Exit) as ended:
        ranks_asked(launched(1), None)
    assert ended.value.exit_code == 0


def test_another_number_than_torchruns(launched) -> None:
    with pytest.raises(UsageError, match="Leave --processes out"):
        ranks_asked(launched(0), 2)


def test_ranks_on_several_machines(launched) -> None:
    with pytest.raises(UsageError, match="several machines"):
        ranks_asked(launched(0, world=8), None)


def test_a_job_of_one_rank_is_one_process(launched) -> None:
    assert ranks_asked(launched(0, world=1, local=1), None) == 1


def words(*more: str) -> list[str]:
    return ["run", RANKS, "--", *more]


@pytest.mark.slow
def test_run_runs_each_rank_to_its_end() -> None:
    command = [sys.executable, "-m", "torchtrim", *words("--epochs", "1")]
    command[5:5] = ["--processes", "2"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.count("done") == 2  # two ranks that write at once may mix their words


@pytest.mark.slow
def test_run_runs_what_a_script_would_spawn() -> None:
    script = str(SCRIPTS / "spawns.py")
    command = [sys.executable, "-m", "torchtrim", "run", script, "--processes", "2", "--", "launch"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert ended.returncode == 0, ended.stderr


@pytest.mark.slow
def test_run_ends_with_the_code_of_the_rank_that_failed(capfd: pytest.CaptureFixture[str]) -> None:
    assert launch(words("--dies", "0", "--at", "1"), 2) == 128 + 9
    assert "rank 0 ended with SIGKILL" in capfd.readouterr().err
