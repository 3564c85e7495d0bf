"""Runs a script planned, and checks some of its steps while it trains: `run --verify-every`."""

from __future__ import annotations

import io
import random
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch

from torchtrim.capture.optimizers import names_of
from torchtrim.certify.live import judge
from torchtrim.errors import Diverged, UsageError
from torchtrim.records.files import write_atomically
from torchtrim.records.plan import Plan
from torchtrim.runner.live import Live, StepVerdict, tell
from torchtrim.runner.planned_script import EndOfScript, run_planned
from torchtrim.runner.script import Script

OnDifference = Literal["stop", "revert"]
Differs = Callable[[Live, int, StepVerdict], None]


def run_checked(
    script: Script, plan: Plan | None, every: int, on_difference: OnDifference = "stop"
) -> None:
    """Run the script planned, and check each step whose number is a multiple of `every`.

    A step that differs stops the run before it, with a `Diverged` and all that was trained in a file; or the
    plan is reverted before it, and the run goes on. Raises `Unsupported` where steps cannot be checked.
    """
    if plan is None or not plan.techniques:
        raise UsageError(
            "--verify-every compares planned steps with original ones: give a plan that changes something, "
            "as in `torchtrim run SCRIPT --plan plan.toml --verify-every 1000`."
        )
    rounds = any(one.equivalence != "BITWISE" for one in plan.techniques)
    name = script.path.stem if script.path is not None else script.target
    differs: Differs = _revert if on_difference == "revert" else partial(_stop, name)
    live = Live(plan, every, partial(judge, rounds=rounds), differs)
    try:
        run_planned(script, plan, live)
    finally:
        if live.alone:
            tell(_summary(live))


def _revert(live: Live, number: int, _: StepVerdict) -> None:
    live.take_back()
    tell(f"the plan was reverted before step {number}, and the run goes on without it")


def _stop(name: str, live: Live, number: int, verdict: StepVerdict) -> None:
    path = Path.cwd() / f"{name}-before-step-{number}.pt"
    write_atomically(path, _saved(live, number - 1))
    raise EndOfScript(
        Diverged(
            f"step {number} {verdict.reason}. The run was stopped before it, and nothing of it is lost: "
            f"{path.name} has the state of its models, optimizers and random generators after step "
            f"{number - 1}, as torch.load reads it. Go on from there without the plan, or with "
            "--on-difference revert."
        )
    )


def _saved(live: Live, steps: int) -> bytes:
    known = live.watcher.optimizers
    state: dict[str, Any] = {
        "steps": steps,
        "models": {name: root.state_dict() for name, root in live.modules.roots.items()},
        "optimizers": {
            name: one.state_dict() for name, one in zip(names_of(known), known, strict=True)
        },
        "random": {"torch": torch.get_rng_state(), "python": random.getstate()},
    }
    buffer = io.BytesIO()
    torch.save(state, buffer)
    return buffer.getvalue()


def _summary(live: Live) -> str:
    found = [verdict.found for _, verdict in live.checked]
    if not found:
        return "no step was checked: the run ended before the first that was to be"
    said = f"{found.count('equal')} of {len(found)} steps that were looked at equal the original"
    most = max(verdict.bytes for _, verdict in live.checked)
    return (
        f"{said}; that took {sum(live.seconds):.2f} s, and at most {most / 2**20:.0f} MiB besides"
    )
