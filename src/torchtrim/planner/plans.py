"""The one place that builds plans, whatever chose their contents."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import PurePath
from typing import Any, NamedTuple

from msgspec.structs import replace

from torchtrim import __version__
from torchtrim.executor.registry import Option, Settings, technique
from torchtrim.planner.stages.calls import passes_in
from torchtrim.records.budget import Budget, MemoryKind
from torchtrim.records.estimate import GrowthLimit
from torchtrim.records.finding import Equivalence
from torchtrim.records.pipeline import Pipeline
from torchtrim.records.plan import CompiledGraph, Plan, Prediction, Status, Technique
from torchtrim.records.profile import Profile


def build_plan(
    source: Profile | str,
    *,
    fingerprint: Mapping[str, str],
    techniques: tuple[Technique, ...],
    predicted: Prediction,
    budget_bytes: int,
    asked: str = "",
    memory_kind: MemoryKind = "allocated",
    script_sha256: str = "",
    pins: Mapping[str, Sequence[str]] | None = None,
    status: Status = "feasible",
    bound_seconds: float | None = None,
    pipeline: Pipeline | None = None,
) -> Plan:
    """Build a plan. `source`: its profile, or the name of a live model.

    `bound_seconds`: a lower bound on the time of a step within the budget.
    """
    script = source if isinstance(source, str) else _within(source.script, source.project)
    if isinstance(source, Profile):
        predicted = replace(predicted, device=source.device)
    return Plan(
        torchtrim=__version__,
        script=script,
        script_sha256=script_sha256,
        fingerprint=dict(fingerprint),
        budget_bytes=budget_bytes,
        asked=asked,
        memory_kind=memory_kind,
        techniques=techniques,
        predicted=predicted,
        pins={what: tuple(patterns) for what, patterns in (pins or {}).items()},
        status=status,
        bound_seconds=bound_seconds,
        pipeline=pipeline,
    )


def graphs_plan(
    script: str,
    compiled: tuple[CompiledGraph, ...],
    *,
    fingerprint: Mapping[str, str],
    predicted: Prediction,
    budget_bytes: int,
    script_sha256: str,
) -> Plan:
    """Return the plan of what a script's compiled graphs save; without graphs, one that changes nothing."""
    plan = build_plan(
        script,
        fingerprint=fingerprint,
        techniques=(),
        predicted=predicted,
        budget_bytes=budget_bytes,
        script_sha256=script_sha256,
    )
    return replace(plan, compiled=compiled)


def pipeline_plan(
    profile: Profile,
    pipeline: Pipeline,
    *,
    fingerprint: Mapping[str, str],
    budget_bytes: int,
    script_sha256: str = "",
) -> Plan:
    """Return the plan of a pipeline, whose ranks should all stay within the budget."""
    seconds = pipeline.seconds * passes_in(profile, pipeline.root)
    return build_plan(
        profile,
        fingerprint=fingerprint,
        techniques=(),
        predicted=Prediction(peak_bytes=max(pipeline.peaks), step_seconds=seconds),
        budget_bytes=budget_bytes,
        script_sha256=script_sha256,
        pipeline=pipeline,
    )


def _within(script: str, project: str) -> str:
    """Return the script's path relative to its project, since a plan is committed there."""
    path = PurePath(script)
    return path.relative_to(project).as_posix() if path.is_relative_to(project) else script


def equivalence_of(option: Option) -> Equivalence:
    """Return the equivalence of the result with an option."""
    return option.equivalence or technique(option.technique).equivalence


def by_technique(
    options: Iterable[Option],
) -> dict[tuple[str, Settings, Equivalence], list[Option]]:
    """Return the options of each technique with its settings and equivalence."""
    groups: defaultdict[tuple[str, Settings, Equivalence], list[Option]] = defaultdict(list)
    for option in options:
        groups[option.technique, option.settings, equivalence_of(option)].append(option)
    return groups


def techniques_of(options: Iterable[Option]) -> tuple[Technique, ...]:
    """Return the techniques of a plan, with options of the same settings as one."""
    return tuple(
        Technique(
            name=name,
            where=tuple(option.where for option in group),
            options=dict(settings),
            equivalence=equivalence,
        )
        for (name, settings, equivalence), group in by_technique(options).items()
    )


def where_of(techniques: Iterable[Technique]) -> list[str]:
    """Return all places of a plan."""
    return [where for technique in techniques for where in technique.where]


class CallOptions(NamedTuple):
    """Allowed techniques for calls without gradients. `parts`: parts of the batch for the first layers."""

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
    """Return the plan that applies these options to calls of the roots in `fingerprint`."""
    settings: dict[str, dict[str, Any]] = {"release": {"gradients": options.gradients_aside}}
    if options.in_place:
        settings["in_place"] = {}
    if options.arena:
        settings["arena"] = {}
    if options.parts > 1:
        settings["split_batch"] = {"parts": options.parts}
    where = tuple(fingerprint)
    return build_plan(
        source,
        fingerprint=fingerprint,
        script_sha256=script_sha256,
        budget_bytes=budget.bytes,
        asked=budget.asked,
        memory_kind=budget.kind,
        techniques=tuple(
            Technique(name=n, where=where, options=o, equivalence=technique(n).equivalence)
            for n, o in settings.items()
        ),
        predicted=predicted or Prediction(peak_bytes=0, step_seconds=0.0),
    )


def adding_up(plan: Plan, original_bytes: int) -> Plan:
    """Have the effects of a plan add up to its prediction, which a measurement may have corrected.

    The correction belongs to the largest saving. A technique without a simulated effect leaves all as it is.
    """
    effects = [*plan.predicted.effects]
    missing = original_bytes - plan.predicted.peak_bytes - sum(one.saved_bytes for one in effects)
    if not missing or len(effects) < len(plan.techniques) or not effects:
        return plan
    at = max(range(len(effects)), key=lambda number: effects[number].saved_bytes)
    effects[at] = replace(effects[at], saved_bytes=effects[at].saved_bytes + missing)
    return replace(plan, predicted=replace(plan.predicted, effects=tuple(effects)))


def rates_plan(
    profile: Profile, techniques: tuple[Technique, ...], growth: GrowthLimit, budget: int
) -> Plan | None:
    """Return the plan of the learning rates for a larger batch, or None without techniques.

    It omits the script's hash and shapes, since the user changes the batch in the script.
    """
    if not techniques:
        return None
    return build_plan(
        profile,
        fingerprint={},
        techniques=techniques,
        predicted=Prediction(peak_bytes=growth.peak_bytes or 0, step_seconds=0.0),
        budget_bytes=budget,
    )
