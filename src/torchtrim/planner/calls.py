"""Plans for calls without gradients, which run by the graphs of their modules."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from torchtrim.executor.registry import technique
from torchtrim.planner.plans import made_plan
from torchtrim.records.budget import Budget
from torchtrim.records.plan import Plan, Prediction, Technique
from torchtrim.records.profile import Profile


class CallOptions(NamedTuple):
    """What may be done. `parts`: in how many parts of the batch the first layers run."""

    in_place: bool = True
    arena: bool = True
    gradients_aside: bool = True
    parts: int = 1


def plan_of_calls(
    source: Profile | str,
    fingerprint: Mapping[str, str],
    options: CallOptions,
    budget: Budget,
    *,
    predicted: Prediction | None = None,
    script_sha256: str = "",
) -> Plan:
    """The plan that these options make of the calls of these roots."""
    return made_plan(
        source,
        fingerprint=fingerprint,
        script_sha256=script_sha256,
        budget_bytes=budget.bytes,
        memory_kind=budget.kind,
        techniques=_techniques(tuple(fingerprint), options),
        predicted=predicted or Prediction(peak_bytes=0, step_seconds=0.0),
    )


def _techniques(where: tuple[str, ...], options: CallOptions) -> tuple[Technique, ...]:
    wanted: dict[str, dict[str, Any]] = {"release": {"gradients": options.gradients_aside}}
    if options.in_place:
        wanted["in_place"] = {}
    if options.arena:
        wanted["arena"] = {}
    if options.parts > 1:
        wanted["split_batch"] = {"parts": options.parts}
    return tuple(
        Technique(name=each, where=where, options=given, equivalence=technique(each).equivalence)
        for each, given in wanted.items()
    )
