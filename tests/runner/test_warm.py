"""A run by fork is as a run by a fresh process, and ends as surely."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from torchtrim.errors import ScriptFailed
from torchtrim.records.trial import Request, Trial
from torchtrim.runner import script as scripts
from torchtrim.runner import warm
from torchtrim.runner.processes import Forked, Fresh, Process
from torchtrim.runner.script import Script, working_folder
from torchtrim.runner.trials import run_trial
from torchtrim.runner.warm import what_it_changes, what_it_sets

BATCH_BYTES = 8 * 8 * 4
"""A worker has up to two batches ready when it is, which no run decides."""
TRAINS = """
import json, os, random, sys
import numpy, torch
from torch import nn

class Data(torch.utils.data.Dataset):
    def __len__(self):
        return 64
    def __getitem__(self, index):
        return torch.full((8,), float(index)) + torch.rand(8)

def main():
    model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.BatchNorm1d(8), nn.Linear(8, 1))
    optimizer = torch.optim.Adam(model.parameters())
    loader = torch.utils.data.DataLoader(
        Data(), batch_size=8, shuffle=True, num_workers=WORKERS, multiprocessing_context=START
    )
    for batch in loader:
        loss = model(batch * random.random() + float(numpy.random.rand())).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

if __name__ == "__main__":
    main()
"""
TELLS = """
import json, os, sys
own = {name for name in sys.modules if name.startswith("torchtrim.attention")}
print(json.dumps({
    "argv": sys.argv, "path": sys.path[:2], "cwd": os.getcwd(), "main": sys.modules["__main__"].__file__,
    "environment": {k: v for k, v in sorted(os.environ.items()) if not k.startswith(("PYTEST_", "COV"))},
    "hash": hash("a string"), "input": sys.stdin.read(), "session": os.getsid(0) == os.getpid(),
    "terminal": sys.stdout.isatty(), "buffered": sys.stdout.write_through, "own": sorted(own),
    "signals": [str(__import__("signal").getsignal(n)) for n in (2, 15, 17)],
    "umask": os.umask(0), "children": os.path.exists("x"), "flags": str(sys.flags),
}))
"""
pytestmark = pytest.mark.skipif(
    not hasattr(os, "pidfd_open"), reason="there is no fork that is told of"
)


@pytest.fixture(autouse=True, scope="module")
def _ends() -> Iterator[None]:
    """One worker for all tests that do not ask for another."""
    yield
    warm.end()


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[Process]:
    """The processes that runs began with."""
    seen: list[Process] = []

    def noted(*args: Any) -> Process:
        seen.append(warm.start(*args))
        return seen[-1]

    monkeypatch.setattr(scripts, "start", noted)
    return seen


def written(folder: Path, lines: str) -> Script:
    path = folder / "train.py"
    path.write_text(textwrap.dedent(lines))
    return Script(str(path), ("--width", "3"), device="cpu", timeout=120.0)


def trial_of(script: Script) -> Trial:
    with working_folder() as folder:
        return run_trial(script, Request(steps=1), folder)


def output_of(script: Script) -> str:
    """What a script prints that never trains."""
    with pytest.raises(ScriptFailed) as failed:
        trial_of(script)
    return str(failed.value.traceback)


def told_by(script: Script) -> dict[str, Any]:
    """The line of JSON that a script prints; whoever measures coverage may print others."""
    (line,) = (line for line in output_of(script).splitlines() if line.startswith("{"))
    told: dict[str, Any] = json.loads(line)
    return told


def both(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.delenv("TORCHTRIM_FRESH", raising=False)
    yield "0"
    monkeypatch.setenv("TORCHTRIM_FRESH", "1")
    yield "1"


def is_alive(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


def gone(*pids: int) -> bool:
    """Whether the processes end soon."""
    deadline = time.monotonic() + 20
    while any(map(is_alive, pids)) and time.monotonic() < deadline:
        time.sleep(0.05)
    return not any(map(is_alive, pids))


@pytest.mark.parametrize(
    ("workers", "start"),
    [
        (0, None),
        pytest.param(2, "fork", marks=pytest.mark.slow),
        pytest.param(1, "spawn", marks=pytest.mark.slow),
    ],
    ids=["none", "fork", "spawn"],
)
def test_it_computes_what_a_fresh_process_does(
    workers: int,
    start: str | None,
    tmp_path: Path,
    started: list[Process],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lines = TRAINS.replace("WORKERS", str(workers)).replace("START", repr(start))
    script = written(tmp_path, lines)
    forked, fresh = (trial_of(script) for _ in both(monkeypatch))
    assert [type(one) for one in started] == [Forked, Fresh]
    assert [step.digests for step in forked.steps] == [step.digests for step in fresh.steps]
    assert forked.profile is not None
    assert fresh.profile is not None
    ready = 2 * workers * BATCH_BYTES
    for one, other in zip(forked.steps, fresh.steps, strict=True):
        assert abs(one.peak_bytes - other.peak_bytes) <= ready
    assert abs(forked.profile.peak_bytes - fresh.profile.peak_bytes) <= ready
    assert abs(len(forked.profile.storages) - len(fresh.profile.storages)) <= 2 * workers


@pytest.mark.slow
def test_it_finds_what_a_fresh_process_finds(
    tmp_path: Path, started: list[Process], monkeypatch: pytest.MonkeyPatch
) -> None:
    script = written(tmp_path, TELLS)
    warm.warm_up(script.path, "cpu")
    monkeypatch.chdir(tmp_path)
    forked, fresh = (told_by(script) for _ in both(monkeypatch))
    assert [type(one) for one in started] == [Forked, Fresh]
    for found in (forked, fresh):
        found["environment"].pop("TORCHTRIM_FRESH", None)
    assert forked == fresh
    assert forked["session"]
    assert forked["own"] == []


@pytest.mark.parametrize(
    "lines",
    [
        'import os\nos.environ["OMP_NUM_THREADS"] = "1"',
        'import os\nos.environ.update(MKL_NUM_THREADS="1")',
        'import os\nos.environ.setdefault("TORCH_SHOW_CPP_STACKTRACES", "1")',
        'import os\nos.putenv("CUDA_VISIBLE_DEVICES", "")',
        "from dotenv import load_dotenv\nload_dotenv()",
        "import beside",
        "from package import beside",
        "import package.beside as other",
        "def late():\n    from package import (\n        beside)",
    ],
)
def test_a_script_that_sets_what_torch_reads_gets_a_fresh_process(
    lines: str, tmp_path: Path
) -> None:
    sets = 'import os\nos.environ["KMP_BLOCKTIME"] = "0"\n'
    (tmp_path / "beside.py").write_text(sets)
    (tmp_path / "package").mkdir()
    (tmp_path / "package/beside.py").write_text(sets)
    script = written(tmp_path, lines)
    assert script.path is not None
    assert what_it_changes(script.path)
    assert not warm.may_fork(script.path, hidden=True)


def test_a_script_that_sets_nothing_is_forked(tmp_path: Path) -> None:
    (tmp_path / "beside.py").write_text("import torch\nWIDTH = 3\n")
    lines = 'import beside, torch.cuda\nCUDA = torch.cuda.is_available()\nname = "torch_omp"\n'
    script = written(tmp_path, lines)
    assert script.path is not None
    assert what_it_changes(script.path) == ""
    assert warm.may_fork(script.path, hidden=True)


def test_threads_are_as_many_as_the_script_says(
    tmp_path: Path, started: list[Process], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    lines = 'import os\nos.environ["OMP_NUM_THREADS"] = "1"\nimport torch\nprint(torch.get_num_threads())'
    assert output_of(written(tmp_path, lines)).strip() == "1"
    assert isinstance(started[0], Fresh)


def test_what_is_set_for_torch_is_found_when_it_is_imported(tmp_path: Path) -> None:
    script = written(
        tmp_path,
        """
        import os
        os.environ["OMP_NUM_THREADS"] = "1"
        os.environ["PYTHONHASHSEED"] = "1"
        os.environ["WIDTH"] = "1"
        os.environ.setdefault("MKL_NUM_THREADS", "1")
        os.environ.setdefault("KMP_BLOCKTIME", "0")
        import torch
        os.environ["TORCH_LOGS"] = "late"
        """,
    )
    assert script.path is not None
    assert what_it_sets(script.path, {"MKL_NUM_THREADS": "2"}) == {
        "OMP_NUM_THREADS": "1",
        "KMP_BLOCKTIME": "0",
    }


def test_a_real_device_gets_a_fresh_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = written(tmp_path, "")
    monkeypatch.setattr(warm, "_GPUS", (str(tmp_path),))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert not warm.may_fork(script.path, hidden=False)
    assert warm.may_fork(script.path, hidden=True)


def test_a_module_gets_a_fresh_process() -> None:
    assert not warm.may_fork(None, hidden=True)


@pytest.mark.slow
def test_one_that_hangs_is_stopped_with_all_that_it_started(
    tmp_path: Path, started: list[Process]
) -> None:
    lines = """
    import os, subprocess, sys, time
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(100)"])
    print(os.getpid(), child.pid, flush=True)
    time.sleep(100)
    """
    script = written(tmp_path, lines)._replace(timeout=3.0)
    warm.warm_up(script.path, "cpu")
    with pytest.raises(ScriptFailed, match="3 s") as failed:
        trial_of(script)
    own, child = map(int, str(failed.value.traceback).split())
    assert isinstance(started[0], Forked)
    assert own == started[0].pid
    assert gone(own, child)


def test_a_death_by_a_signal_is_named(tmp_path: Path, started: list[Process]) -> None:
    with pytest.raises(ScriptFailed, match="SIGKILL"):
        trial_of(written(tmp_path, "import os; os.kill(os.getpid(), 9)"))
    with pytest.raises(ScriptFailed, match="exited with 3"):
        trial_of(written(tmp_path, "import sys; sys.exit(3)"))
    assert all(isinstance(one, Forked) for one in started)


def test_it_ends_with_what_it_started_when_interrupted(
    tmp_path: Path, started: list[Process], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object) -> bool:
        raise KeyboardInterrupt

    monkeypatch.setattr(scripts, "_wait", interrupted)
    with pytest.raises(KeyboardInterrupt):
        trial_of(written(tmp_path, "import time; time.sleep(100)"))
    assert gone(started[0].pid)


@pytest.mark.slow
@pytest.mark.parametrize(
    "number",
    [
        pytest.param(signal.SIGINT, id="Ctrl-C", marks=pytest.mark.slow),
        pytest.param(signal.SIGKILL, id="kill"),
    ],
)
def test_nothing_stays_when_the_parent_is_gone(number: int, tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    script = written(
        tmp_path,
        f"""
        import os, subprocess, sys, time
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(100)"])
        keeper = os.getppid()
        worker = int(open(f"/proc/{{keeper}}/stat").read().rpartition(")")[2].split()[1])
        with open({str(pids)!r} + ".new", "w") as file:
            file.write(f"{{os.getpid()}} {{child.pid}} {{keeper}} {{worker}}")
        os.rename({str(pids)!r} + ".new", {str(pids)!r})
        time.sleep(100)
        """,
    )
    command = [sys.executable, "-m", "torchtrim", "diagnose", script.target, "--device", "cpu"]
    with subprocess.Popen(
        command,
        cwd=tmp_path,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        preexec_fn=lambda: signal.signal(
            signal.SIGINT, signal.SIG_DFL
        ),  # a job in the background ignores it
    ) as process:
        deadline = time.monotonic() + 100
        while not pids.exists() and time.monotonic() < deadline:
            time.sleep(0.1)
        process.send_signal(number)
        process.wait(60)
    assert gone(*map(int, pids.read_text().split()))


@pytest.mark.slow
def test_a_worker_that_died_is_replaced(tmp_path: Path, started: list[Process]) -> None:
    script = written(tmp_path, "print('here')")
    assert output_of(script) == "here\n"
    assert warm._warm is not None
    warm._warm.process.kill()
    assert output_of(script) == "here\n"
    assert all(isinstance(one, Forked) for one in started)


@pytest.mark.slow
def test_another_environment_gets_another_worker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = written(tmp_path, "import torch\nprint(torch.get_num_threads())")
    for threads in ("1", "2"):
        monkeypatch.setenv("OMP_NUM_THREADS", threads)
        assert output_of(script).strip() == threads


@pytest.mark.slow
def test_the_worker_runs_no_operator_and_starts_no_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("OPENBLAS_NUM_THREADS", "1")
    script = written(tmp_path, "print(__import__('os').getppid())")
    output_of(script)
    worker = warm._warm
    assert worker is not None
    assert len(list(Path(f"/proc/{worker.process.pid}/task").iterdir())) == 1


def test_a_worker_that_cannot_start_is_done_without(
    tmp_path: Path, started: list[Process], monkeypatch: pytest.MonkeyPatch
) -> None:
    script = written(tmp_path, "print('here')")
    warm.end()
    monkeypatch.setattr(warm, "_MODULE", "torchtrim.runner.no_such_module")
    assert output_of(script) == "here\n"
    assert isinstance(started[0], Fresh)
