from __future__ import annotations

import contextlib
import os
import textwrap
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest

from torchtrim.errors import UsageError
from torchtrim.runner import script as scripts
from torchtrim.runner.processes import Process
from torchtrim.runner.script import Ended, Script, failure, run_script, working_folder

Run = Callable[..., Ended]

PRELUDE = """
import os, pathlib, subprocess, sys, time
folder = pathlib.Path(sys.argv[1])
def settle(text):
    (folder / "outcome.json").write_text(text)
def say(text):
    (folder / "status").write_text(text)
"""


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Runs the lines as the process of a script."""
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(scripts, "_GRACE_SECONDS", 0.3)
    folder = tmp_path / "work"
    folder.mkdir()

    def go(lines: str, *, timeout: float = 20.0, said: list[str] | None = None) -> Ended:
        (tmp_path / "entry_of_test.py").write_text(PRELUDE + textwrap.dedent(lines))
        script = Script("train.py", timeout=timeout)
        progress = (said if said is not None else []).append
        return run_script(
            script, b"the task", entry="entry_of_test", folder=folder, progress=progress
        )

    return go


def is_alive(pid: int) -> bool:
    """Whether a process is there and no zombie."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


def test_it_finds_its_task_and_leaves_its_outcome(run: Run) -> None:
    ended = run('settle((folder / "task.json").read_text() + " is done"); print("hello")')
    assert ended.outcome == b"the task is done"
    assert (ended.returncode, ended.output, ended.timed_out) == (0, "hello\n", False)


def test_it_has_no_standard_input(run: Run) -> None:
    assert "EOFError" in run("input()").output


def test_its_progress_is_told(run: Run) -> None:
    said: list[str] = []
    ended = run('say("step 1"); time.sleep(0.3); say("step 2"); time.sleep(0.3)', said=said)
    assert said == ["step 1", "step 2"]
    assert ended.status == "step 2"


def test_one_that_hangs_is_stopped_with_all_that_it_started(run: Run) -> None:
    ended = run(
        """
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
        print(os.getpid(), child.pid, flush=True)
        time.sleep(60)
        """,
        timeout=1.5,
    )
    assert ended.timed_out
    assert ended.outcome is None
    deadline = time.monotonic() + 5
    pids = [int(pid) for pid in ended.output.split()]
    while any(map(is_alive, pids)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(map(is_alive, pids))


def test_one_that_does_not_end_after_its_outcome_is_stopped_soon(run: Run) -> None:
    begin = time.monotonic()
    ended = run('settle("done"); time.sleep(60)')
    assert ended.outcome == b"done"
    assert not ended.timed_out
    assert time.monotonic() - begin < 20


def test_it_ends_when_this_process_raises(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    killed: list[int] = []

    def interrupted(process: Process, *_: object) -> bool:
        killed.append(process.pid)
        raise KeyboardInterrupt

    monkeypatch.setattr(scripts, "_wait", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run("time.sleep(60)")
    assert not is_alive(killed[0])


def test_a_lifeline_tells_it_that_this_process_is_gone(run: Run) -> None:
    ended = run(
        """
        import select
        lifeline = int(sys.argv[2])
        settle(str(len(select.select([lifeline], [], [], 0.2)[0])))
        """
    )
    assert ended.outcome == b"0"


def test_a_death_by_a_signal_is_named(run: Run) -> None:
    ended = run('print("so far"); sys.stdout.flush(); os.kill(os.getpid(), 9)')
    error = failure(ended, 20.0)
    assert "SIGKILL" in str(error)
    assert "memory" in str(error)
    assert "so far" in str(error.traceback)


def test_a_time_out_is_named() -> None:
    error = failure(Ended(None, -9, "", "step 3 of 5", True), 30.0)
    assert "30 s" in str(error)
    assert "step 3 of 5" in str(error.learnt)


def test_only_the_end_of_a_long_output_is_kept(run: Run) -> None:
    lines = run("for i in range(5000): print(i)").output.splitlines()
    assert (lines[0], lines[-1]) == ("...", "4999")
    assert len(lines) < 1000
    assert all(int(b) - int(a) == 1 for a, b in pairwise(lines[1:]))
    bar = run('print("=" * 10_000, end="")').output
    assert bar == "...\n" + "=" * 4000


def test_the_devices_that_it_sees(run: Run) -> None:
    assert "CUDA_VISIBLE_DEVICES" not in scripts.environment_of(
        Script("a.py"), False
    ) or os.environ.get("CUDA_VISIBLE_DEVICES")
    for device in ("cpu", "emulated"):
        assert (
            scripts.environment_of(Script("a.py", device=device), False)["CUDA_VISIBLE_DEVICES"]
            == ""
        )


def test_a_script_that_is_not_there() -> None:
    with pytest.raises(UsageError, match="does not exist"):
        Script("nowhere.py").check()
    Script("a.module", module=True).check()
    assert Script("a.module", module=True).path is None


def test_a_working_folder_is_gone_afterwards() -> None:
    with working_folder() as folder:
        (folder / "file").touch()
    assert not folder.exists()
