"""The one maker of plans: whatever chose what is in them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import PurePath

import msgspec

from torchtrim import __version__
from torchtrim.executor.registry import Option, Settings, technique
from torchtrim.planner.stages.calls import passes_in
from torchtrim.records.budget import MemoryKind
from torchtrim.records.finding import Equivalence
from torchtrim.records.pipeline import Pipeline
from torchtrim.records.plan import Plan, Prediction, Status, Technique
from torchtrim.records.profile import Profile


def made_plan(
    source: Profile | str,
    *,
    fingerprint: Mapping[str, str],
    techniques: tuple[Technique, ...],
    predicted: Prediction,
    budget_bytes: int,
    memory_kind: MemoryKind = "allocated",
    script_sha256: str = "",
    pins: Mapping[str, Sequence[str]] | None = None,
    status: Status = "feasible",
    bound_seconds: float | None = None,
) -> Plan:
    """A plan. `source`: the profile that it was made from, or the name of a live model.

    `bound_seconds`: what a step within the budget takes at least, as far as is known.
    """
    script = source if isinstance(source, str) else _within(source.script, source.project)
    return Plan(
        torchtrim=__version__,
        script=script,
        script_sha256=script_sha256,
        fingerprint=dict(fingerprint),
        budget_bytes=budget_bytes,
        memory_kind=memory_kind,
        techniques=techniques,
        predicted=predicted,
        pins={what: tuple(patterns) for what, patterns in (pins or {}).items()},
        status=status,
        bound_seconds=bound_seconds,
    )


def pipeline_plan(
    profile: Profile,
    pipeline: Pipeline,
    *,
    fingerprint: Mapping[str, str],
    budget_bytes: int,
    script_sha256: str = "",
) -> Plan:
    """A plan of a model in stages, each rank of which is to stay within the budget."""
    seconds = pipeline.seconds * passes_in(profile, pipeline.root)
    predicted = Prediction(peak_bytes=max(pipeline.peaks), step_seconds=seconds)
    made = made_plan(
        profile,
        fingerprint=fingerprint,
        techniques=(),
        predicted=predicted,
        budget_bytes=budget_bytes,
        script_sha256=script_sha256,
    )
    return msgspec.structs.replace(made, pipeline=pipeline)


def _within(script: str, project: str) -> str:
    """The script's path from its project, since a plan is committed there."""
    path = PurePath(script)
    return path.relative_to(project).as_posix() if path.is_relative_to(project) else script


def equivalence_of(option: Option) -> Equivalence:
    """How equal the result is with an option."""
    return option.equivalence or technique(option.technique).equivalence


def techniques_of(options: Iterable[Option]) -> tuple[Technique, ...]:
    """The options of a plan: those of one technique with the same settings together."""
    places: defaultdict[tuple[str, Settings, Equivalence], list[str]] = defaultdict(list)
    for option in options:
        places[option.technique, option.settings, equivalence_of(option)].append(option.where)
    return tuple(
        Technique(
            name=name,
            where=tuple(where),
            options=dict(settings),
            equivalence=equivalence,
        )
        for (name, settings, equivalence), where in places.items()
    )


def where_of(techniques: Iterable[Technique]) -> list[str]:
    """All places of a plan."""
    return [where for one in techniques for where in one.where]
