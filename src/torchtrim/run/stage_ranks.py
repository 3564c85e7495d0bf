"""Runs a script in several processes of this machine at once, one for each rank of a pipeline."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

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
_LOST = ("connection closed", "connection reset", "gloo", "connection was")
_REFUSED, _RAISED, _DIED, _LOST_RANK, _ENDED = range(5)
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
    ending = _Ending(False, -1)
    try:
        for rank, own in enumerate(folders):
            own.mkdir()
            (own / TASK).write_bytes(msgspec.json.encode(task))
            environment = _environment(rank, ranks)
            processes.append(start(_ENTRY, own, own / "output", environment, script.path))
        progress(f"{ranks} processes start" if ranks > 1 else "the script starts")
        ending = _wait(processes, folders, script.timeout)
    finally:
        for process in processes:
            process.end()
    return _outcomes(script, processes, folders, ending)


def _environment(rank: int, ranks: int) -> dict[str, str]:
    environment = {**environment_of_runs(), "CUDA_VISIBLE_DEVICES": ""}
    if ranks > 1:
        own = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks)}
        environment = {**environment, **own}
        if sys.platform.startswith("linux"):
            environment.setdefault("GLOO_SOCKET_IFNAME", "lo")
    return environment


class _Ending(NamedTuple):
    """How it ended: whether it took too long, and the rank that failed first, -1 for none."""

    timed_out: bool
    first: int


def _wait(processes: Sequence[Process], folders: Sequence[Path], timeout: float) -> _Ending:
    """Wait until all have ended, or, a little later, one without the file that was wanted."""
    deadline = time.monotonic() + timeout
    left = list(range(len(processes)))
    first = -1
    while left:
        if time.monotonic() > deadline:
            return _Ending(first < 0, first)
        for rank in [one for one in left if processes[one].ended()]:
            left.remove(rank)
            if first < 0 and not _is_well(folders[rank]):
                first, deadline = rank, min(deadline, time.monotonic() + _GRACE_SECONDS)
        time.sleep(_POLL_SECONDS)
    return _Ending(False, first)


def _is_well(folder: Path) -> bool:
    path = folder / OUTCOME
    return path.exists() and msgspec.json.decode(path.read_bytes(), type=StageTrial).crash is None


def _outcomes(
    script: Script, processes: Sequence[Process], folders: Sequence[Path], ending: _Ending
) -> list[tuple[StageTrial, Path]]:
    found: list[tuple[StageTrial, Path]] = []
    errors: list[tuple[int, Exception]] = []
    for rank, (process, folder) in enumerate(zip(processes, folders, strict=True)):
        path = folder / OUTCOME
        output = (folder / "output").read_text(errors="replace")[-_TAIL_CHARACTERS:]
        if not path.exists():
            status = (folder / STATUS).read_text() if (folder / STATUS).exists() else ""
            ended = Ended(None, process.returncode, output, status, ending.timed_out)
            errors.append(
                (_DIED if rank == ending.first else _ENDED, failure(ended, script.timeout))
            )
            continue
        trial = msgspec.json.decode(path.read_bytes(), type=StageTrial)
        found.append((trial, folder))
        if trial.crash is not None:
            errors.append(_error(rank, len(folders), trial, output))
    if errors:
        raise min(errors, key=lambda one: one[0])[1]
    return found


def _error(rank: int, ranks: int, trial: StageTrial, output: str) -> tuple[int, Exception]:
    """What a rank failed with, and how much it tells: a lost connection follows from another's failure."""
    crash = trial.crash
    assert crash is not None
    where = f" on rank {rank}" if ranks > 1 else ""
    if crash.kind == "refused":
        return _REFUSED, ApplyFailed(crash.message)
    said = f"the script failed{where}: {crash.message}"
    lost = any(word in crash.message.lower() for word in _LOST)
    return _LOST_RANK if lost else _RAISED, ScriptFailed(said, traceback=crash.traceback or output)
