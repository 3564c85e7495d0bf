"""Runs a script once, or as the ranks of a pipeline, for the certificate of the pipeline."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec

from torchtrim.errors import ApplyFailed, ScriptFailed
from torchtrim.runner.ranks.ranks import RankEnded, folder_of, run_ranks
from torchtrim.runner.ranks.trials import first_failed, on_rank
from torchtrim.runner.script import Script, failure, run_script
from torchtrim.runner.stage_worker import StageTask, StageTrial

_ENTRY = "torchtrim.runner.stage_worker"
Progress = Callable[[str], None]


def run_stages(
    script: Script, task: StageTask, ranks: int, folder: Path, progress: Progress
) -> list[tuple[StageTrial, Path]]:
    """Run the task on so many ranks; what each left, and its folder. Nothing of them is left behind.

    Where one fails the others are ended. Raises `ScriptFailed`, and `ApplyFailed` where the plan was refused.
    """
    script.check()
    script = script._replace(processes=ranks, only=0 if ranks == 1 else -1)
    task = msgspec.structs.replace(task, method=str((folder / "store").absolute()))
    ended = _run(script, msgspec.json.encode(task), folder, progress)
    culprit = first_failed(ended)
    if culprit is not None:
        raise _error(culprit, ended, script)
    folders = [folder_of(folder, rank.number, script.only) for rank in ended]
    return [(_trial_of(rank), own) for rank, own in zip(ended, folders, strict=True)]


def _run(script: Script, task: bytes, folder: Path, progress: Progress) -> list[RankEnded]:
    """Run it; a single process is no rank, and finds none in its environment."""
    if script.processes > 1:
        tasks = [task] * script.processes
        return run_ranks(
            script, tasks, folder=folder, progress=progress, entry=_ENTRY, hide_gpu=True
        )
    ended = run_script(script, task, entry=_ENTRY, folder=folder, progress=progress, hide_gpu=True)
    failed = None if ended.outcome is not None and _crash_free(ended.outcome) else 0
    return [RankEnded(0, ended, failed, False, script.timeout, ())]


def _crash_free(outcome: bytes) -> bool:
    return msgspec.json.decode(outcome, type=StageTrial).crash is None


def _trial_of(rank: RankEnded) -> StageTrial:
    assert rank.ended.outcome is not None
    return msgspec.json.decode(rank.ended.outcome, type=StageTrial)


def _error(culprit: RankEnded, ranks: list[RankEnded], script: Script) -> Exception:
    """What the rank that failed first for a reason of its own says, and what became of the others."""
    crash = None if culprit.ended.outcome is None else _trial_of(culprit).crash
    if crash is not None and crash.kind == "refused":
        return ApplyFailed(crash.message)
    if crash is None:
        error = failure(culprit.ended, script.timeout)
    else:
        trace = crash.traceback or culprit.ended.output
        error = ScriptFailed(f"the script failed: {crash.message}", traceback=trace)
    if len(ranks) > 1:
        on_rank(error, culprit, ranks, script.project)
    return error
