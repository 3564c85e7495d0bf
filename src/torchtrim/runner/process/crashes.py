"""What a person reads of a script that failed."""

from __future__ import annotations

from torchtrim.analysis.peak import holders
from torchtrim.core.units import format_bytes
from torchtrim.errors import ApplyFailed, NothingTrains, ScriptFailed
from torchtrim.executor.failing import note
from torchtrim.records.trial import Crash, Trial

_WANTS_RANKS = (
    "environment variable RANK",
    "environment variable WORLD_SIZE",
    "'LOCAL_RANK'",
    "'RANK'",
)


def crash_error(trial: Trial, crash: Crash, output: str) -> Exception:
    """The error for a script that failed: what happened, and what was learnt until then."""
    if crash.kind == "refused":
        refused = ApplyFailed(crash.message)
        note(refused, crash.place)
        return refused
    learnt = _learnt(trial, crash)
    trace = crash.traceback or output
    if crash.kind == "no step":
        return _kind_of_no_step(trial)(_no_step(trial), learnt=learnt, traceback=output)
    if "EOFError" in crash.message:
        return ScriptFailed(
            "the script reads standard input, and torchtrim gives it none, since it runs the script "
            "several times. Pass what it asks for as arguments, after `--`.",
            learnt=learnt,
            traceback=trace,
        )
    if any(words in crash.message for words in _WANTS_RANKS):
        return ScriptFailed(
            f"the script is one of several processes: {crash.message}. Say how many: --processes 2, or "
            "run torchtrim under torchrun.",
            learnt=learnt,
            traceback=trace,
        )
    if crash.kind == "out of memory":
        return ScriptFailed(
            f"the script ran out of memory: {crash.message}", learnt=learnt, traceback=trace
        )
    return ScriptFailed(f"the script failed: {crash.message}", learnt=learnt, traceback=trace)


def _kind_of_no_step(trial: Trial) -> type[ScriptFailed]:
    trains = trial.backwards or trial.processes or trial.request.infers
    return NothingTrains if trial.fingerprint and not trains else ScriptFailed


def _no_step(trial: Trial) -> str:
    if trial.processes:
        return (
            f"the script started {trial.processes} process(es) of its own and trained nothing in the one "
            "that torchtrim runs, so there is no step to record. Give --processes with the number of ranks "
            "that it spawns, or have it train in a single process: most scripts have an option for that."
        )
    if trial.elsewhere and not trial.forwards:
        return (
            "the script called its modules in another thread than its main one, and torchtrim watches the "
            "main one alone, so there is no step to record. Call the function that trains directly, not "
            "through threading.Thread or a pool of threads."
        )
    if trial.request.infers:
        return (
            f"the script ended after {trial.forwards} calls of its models, and {trial.request.total} are "
            "wanted of the first one. Let it run for more, or give --steps 1 --warmup 0."
        )
    if not trial.forwards:
        return (
            "the script ended, and it never called a module with gradients on. torchtrim needs a loop "
            "that trains; check that the script was given the arguments with which it does. For one that "
            "only runs a model: torchtrim optimize SCRIPT --mode inference."
        )
    if not trial.optimizer_steps:
        return (
            f"the script ended after {trial.forwards} forwards and {trial.backwards} backwards, and no "
            "torch.optim.Optimizer ever stepped, nor did parameters change after a backward, so there is no "
            "step to record. Check that the script was given the arguments with which it trains."
        )
    return "the script ended before its first step was complete. Let it run for more steps."


def _learnt(trial: Trial, crash: Crash) -> str:
    """What was seen until the failure: the operator, and who was alive."""
    lines = [
        f"{len(trial.steps)} steps were complete; {trial.forwards} forwards, {trial.backwards} "
        f"backwards, {trial.optimizer_steps} optimizer steps."
    ]
    if crash.operator:
        place = f" at {crash.path}:{crash.line}" if crash.path else ""
        lines.append(f"It failed in {crash.operator}({crash.shapes}) in the {crash.phase}{place}.")
    profile = trial.profile
    if profile is not None and profile.operators:
        last = len(profile.operators) - 1
        found = holders(profile, last, 6)
        total = sum(holder.bytes for holder in found)
        lines.append(f"{format_bytes(total)} were alive then:")
        for holder in found:
            place = f" {holder.path}:{holder.line}" if holder.path else ""
            lines.append(
                f"  {format_bytes(holder.bytes):>9}  {holder.kind} {holder.module}{place} ({holder.why})"
            )
    return "\n".join(lines)
