"""Plans the calls of a script that only runs its models, measures and verifies them."""

from __future__ import annotations

import msgspec

from torchtrim import __version__
from torchtrim.certify.fit import Fit, Fitting, measured
from torchtrim.certify.network import Options, techniques_for
from torchtrim.certify.trial import Trial
from torchtrim.errors import InfeasibleBudget, UsageError
from torchtrim.observe.script import Script
from torchtrim.records.plan import MemoryKind, Plan, Prediction
from torchtrim.records.profile import Profile
from torchtrim.techniques.fingerprint import sha256_of
from torchtrim.units import format_bytes, parse_bytes

_MOST_PARTS = 32
RELEASE = "release"


def fit_calls(
    fitting: Fitting, script: Script, memory: str | int | None, memory_kind: MemoryKind
) -> Fit:
    """Plan every call; where a budget wants less, the first layers in ever more parts of the batch.

    Raises `UsageError` for a script that trains, and `InfeasibleBudget` where nothing fits.
    """
    if script.device not in (None, "cpu", "cuda"):
        raise UsageError(
            f"--device {script.device}: --mode inference plans calls on a device that is there. Give cpu."
        )
    original = fitting.observe()
    _check(original)
    whole = measured(original, memory_kind)
    budget = whole if memory is None else parse_bytes(memory, whole=whole)
    parts, smallest = 1, whole
    while parts <= _MOST_PARTS:
        plan = _plan(script, original, budget, memory_kind, parts)
        planned = fitting.run_planned(plan)
        used = measured(planned, memory_kind)
        smallest = min(smallest, used)
        if memory is None or used <= budget:
            plan = msgspec.structs.replace(plan, predicted=_predicted(original, planned))
            certificate = fitting.verify(original, plan, planned)
            return Fit(original, budget, plan, planned, certificate, planned.notes)
        parts *= 2
    raise InfeasibleBudget(
        f"no plan brings the peak to {format_bytes(budget)}. The smallest found needs "
        f"{format_bytes(smallest)} ({smallest} bytes), the first layers in up to {_MOST_PARTS} parts of "
        f"the batch. Give --memory {smallest} or more, or make the batch smaller.",
        smallest_bytes=smallest,
        set_by="the calls' results and what is there always",
    )


def is_of_calls(plan: Plan) -> bool:
    """Whether the plan is one of calls without gradients."""
    return any(one.name == RELEASE for one in plan.techniques)


def _check(trial: Trial) -> None:
    if trial.optimizer_steps or trial.backwards:
        raise UsageError(
            f"the script trains: it ran {trial.backwards} backwards and {trial.optimizer_steps} "
            "optimizer steps. --mode inference is for scripts that only run a model; leave it out, and "
            "give --memory."
        )


def _plan(
    script: Script, original: Trial, budget: int, memory_kind: MemoryKind, parts: int
) -> Plan:
    path = script.path
    return Plan(
        torchtrim=__version__,
        script=script.target,
        script_sha256=sha256_of(path) if path else "",
        fingerprint=original.fingerprint,
        budget_bytes=budget,
        memory_kind=memory_kind,
        techniques=techniques_for(
            tuple(original.fingerprint), Options(gradients_aside=False, parts=parts)
        ),
        predicted=Prediction(peak_bytes=0, step_seconds=0.0),
    )


def _predicted(original: Trial, planned: Trial) -> Prediction:
    """What the calls' plans foretell: what is there when a call begins, and what the plan needs."""
    profile = original.profile
    assert profile is not None
    starts = [call.first for call in profile.calls if call.depth == 0]
    before = max((_alive_before(profile, start) for start in starts), default=0)
    peak = before + planned.call_bytes if planned.call_bytes is not None else original.peak_bytes
    return Prediction(peak_bytes=peak, step_seconds=original.seconds)


def _alive_before(profile: Profile, operator: int) -> int:
    return sum(s.bytes for s in profile.storages if s.birth < operator < s.death)
