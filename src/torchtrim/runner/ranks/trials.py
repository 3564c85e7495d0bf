"""How several ranks ended -> one trial, or the reason on every rank."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec

from torchtrim.errors import ScriptFailed
from torchtrim.records.trial import Crash, Trial
from torchtrim.runner.ranks.ranks import SURVIVORS_SECONDS, RankEnded, crash_in

_LOST = (
    *("connection", "gloo", "nccl", "distbackenderror", "diststoreerror", "distnetworkerror"),
    *("broken pipe", "socket", "timed out", "timeout", "store"),
)
"""Words of the errors that a rank meets when another one is gone."""
_TORCH = ("/torch/", "torch\\")
_EXCHANGES = ("/torch/distributed/", "/torch/nn/parallel/", "/torch/autograd/")


def merged(trials: Sequence[Trial], only: int = -1) -> Trial:
    """The trial of the rank with the highest peak, with those of all; or that of `only`."""
    if only >= 0:
        return trials[only]
    largest = max(trials, key=lambda trial: trial.peak_bytes)
    return msgspec.structs.replace(largest, ranks=tuple(trials))


def first_failed(ranks: Sequence[RankEnded]) -> RankEnded | None:
    """The rank that failed for a reason of its own, as far as can be told; None if none failed.

    One that died by itself comes before those that raised, and what only tells of a lost peer comes last.
    """
    failed = [rank for rank in ranks if rank.failed_ns is not None]
    if failed:
        return min(failed, key=_order)
    stopped = [rank for rank in ranks if rank.stopped]
    return min(stopped, key=lambda rank: (_exchanges(rank), rank.number), default=None)


def _order(rank: RankEnded) -> tuple[int, int]:
    assert rank.failed_ns is not None
    crash = crash_in(rank.ended.outcome)
    if crash is None:
        return 0, rank.failed_ns
    return 1 + _tells_of_lost_peer(crash), rank.failed_ns


def _tells_of_lost_peer(crash: Crash) -> bool:
    return any(word in crash.message.lower() for word in _LOST)


def on_rank(
    error: Exception, culprit: RankEnded, ranks: Sequence[RankEnded], project: Path
) -> None:
    """Have the error of one rank name it, and say what became of the others."""
    error.args = (f"rank {culprit.number} of {len(ranks)}: {error}",)
    if isinstance(error, ScriptFailed):
        others = [account(rank, project) for rank in ranks if rank is not culprit]
        where = _where(culprit, project)
        own = [f"rank {culprit.number} was at {where}"] if where else []
        error.learnt = "\n".join([*own, *others, *filter(None, [error.learnt])])


def account(rank: RankEnded, project: Path) -> str:
    """What became of a rank, in a line."""
    crash = crash_in(rank.ended.outcome)
    who = f"rank {rank.number}"
    if crash is not None:
        first = crash.message.partition("\n")[0]
        return f"{who} then failed: {first[:200]}"
    if rank.failed_ns is not None:
        return f"{who} died with exit status {rank.ended.returncode} at {rank.ended.status or 'its start'}"
    if not rank.stopped:
        return f"{who} did all its steps"
    where = _where(rank, project)
    waits = ", where it waited for others" if _exchanges(rank) else ""
    at = f" and {where}{waits}" if where else ""
    limit = "" if rank.ended.timed_out else f" within {SURVIVORS_SECONDS:.0f} s of the failure"
    return f"{who} was stopped{limit} at {rank.ended.status or 'its start'}{at}"


def _where(rank: RankEnded, project: Path) -> str:
    """The user's own line among those where the rank is."""
    own = (line for line in rank.stack if line.startswith(str(project)))
    others = (line for line in rank.stack if not any(part in line for part in _TORCH))
    return next(own, next(others, ""))


def _exchanges(rank: RankEnded) -> bool:
    """Whether the rank is inside an exchange with others."""
    return any(part in line for line in rank.stack[:6] for part in _EXCHANGES)
