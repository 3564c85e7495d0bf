"""Runs a script in several processes of this machine at once, one for each rank of a pipeline."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from torchtrim.errors import ApplyFailed, ScriptFailed
from torchtrim.run.processes import Process
from torchtrim.run.script import OUTCOME, STATUS, TASK, Ended, Script, failure
from torchtrim.run.stage_worker import StageTask, StageTrial
from torchtrim.run.warm import environment_of_runs, start

_ENTRY = "torchtrim.run.stage_worker"
_POLL_SECONDS = 0.05
_GRACE_SECONDS = 20.0
_TAIL_CHARACTERS = 4000
Progress = Callable[[str], None]


def run_ranks(
    script: Script, task: StageTask, ranks: int, folder: Path, progress: Progress
) -> list[tuple[StageTrial, Path]]:
    """Run the task on so many ranks; what each left, and its folder. Nothing of them is left behind.

    Where one fails the others are ended. Raises `ScriptFailed`, and `ApplyFailed` where the plan was refused.
    """
    script.check()
    folders = [folder / f"rank{rank}" for rank in range(ranks)]
    task = msgspec.structs.replace(task, method=str((folder / "store").absolute()))
    processes: list[Process] = []
    try:
        for rank, own in enumerate(folders):
            own.mkdir()
            (own / TASK).write_bytes(msgspec.json.encode(task))
            environment = _environment(rank, ranks)
            processes.append(start(_ENTRY, own, own / "output", environment, script.path))
        progress(f"{ranks} processes start" if ranks > 1 else "the script starts")
        timed_out = _wait(processes, folders, script.timeout)
    finally:
        for process in processes:
            process.end()
    return _outcomes(script, processes, folders, timed_out)


def _environment(rank: int, ranks: int) -> dict[str, str]:
    environment = {**environment_of_runs(), "CUDA_VISIBLE_DEVICES": ""}
    if ranks > 1:
        own = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks)}
        environment = {**environment, **own, "GLOO_SOCKET_IFNAME": _loopback()}
    return environment


def _loopback() -> str:
    return os.environ.get("GLOO_SOCKET_IFNAME", "lo")


def _wait(processes: Sequence[Process], folders: Sequence[Path], timeout: float) -> bool:
    """Wait until all have ended, or, a little later, one without what was wanted.

    True if it took too long.
    """
    deadline = time.monotonic() + timeout
    left = list(range(len(processes)))
    failing = False
    while left:
        if time.monotonic() > deadline:
            return not failing
        for rank in [one for one in left if processes[one].ended()]:
            left.remove(rank)
            if not failing and not _is_well(folders[rank]):
                failing, deadline = True, min(deadline, time.monotonic() + _GRACE_SECONDS)
        time.sleep(_POLL_SECONDS)
    return False


def _is_well(folder: Path) -> bool:
    path = folder / OUTCOME
    return path.exists() and msgspec.json.decode(path.read_bytes(), type=StageTrial).crash is None


def _outcomes(
    script: Script, processes: Sequence[Process], folders: Sequence[Path], timed_out: bool
) -> list[tuple[StageTrial, Path]]:
    found: list[tuple[StageTrial, Path]] = []
    errors: list[tuple[int, Exception]] = []
    for rank, (process, folder) in enumerate(zip(processes, folders, strict=True)):
        path = folder / OUTCOME
        output = (folder / "output").read_text(errors="replace")[-_TAIL_CHARACTERS:]
        if not path.exists():
            status = (folder / STATUS).read_text() if (folder / STATUS).exists() else ""
            ended = Ended(None, process.returncode, output, status, timed_out)
            errors.append((2, failure(ended, script.timeout)))
            continue
        trial = msgspec.json.decode(path.read_bytes(), type=StageTrial)
        found.append((trial, folder))
        if trial.crash is not None:
            errors.append(_error(rank, len(folders), trial, output))
    if errors:
        raise min(errors, key=lambda one: one[0])[1]
    return found


def _error(rank: int, ranks: int, trial: StageTrial, output: str) -> tuple[int, Exception]:
    """What a rank failed with, and how late it comes: a lost connection follows from another's failure."""
    crash = trial.crash
    assert crash is not None
    where = f" on rank {rank}" if ranks > 1 else ""
    if crash.kind == "refused":
        return 0, ApplyFailed(crash.message)
    lost = "Connection closed by peer" in crash.message or "gloo" in crash.message
    said = f"the script failed{where}: {crash.message}"
    return 1 + lost, ScriptFailed(said, traceback=crash.traceback or output)
