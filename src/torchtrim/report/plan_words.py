"""A plan in words: each technique's effect, place, savings and cost."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby

from torchtrim.core.units import counted, format_bytes, format_seconds
from torchtrim.executor.registry import technique as unit
from torchtrim.records import Report, Technique
from torchtrim.records.plan import PredictedEffect
from torchtrim.records.report import PlanSummary
from torchtrim.report import stages
from torchtrim.report.blocks import first

_FREE = 0.001  # A smaller share of a step is lost in its spread.
_PROVEN = 0.0005  # Smaller gaps would be shown as 0.0 %.
_ROLE = re.compile(r":(?=[A-Za-z_])")
"""Before the role of an operator, as in `Net:relu.0`; not within the bounds of a chain, as in `Net[0:5]`."""


def plan_lines(report: Report) -> list[str]:
    """Return a line for each technique of the plan with its effect, or for each stage."""
    if report.pipeline is not None:
        return stages.lines(report.pipeline)
    if report.plan is None:
        return []
    if report.plan.graphs:
        graphs = counted(report.plan.graphs, "compiled graph")
        return [f"save less for backward in {graphs}; torch.compile stays on"]
    return [*_effect_lines(report.plan)]


def _effect_lines(plan: PlanSummary) -> Iterator[str]:
    """Yield `"-48.0 MiB, free: write results over inputs: 7 ReLU (overwrite)"` for each technique."""
    effects = list(plan.predicted.effects)
    for number, technique in enumerate(plan.techniques):
        if number >= len(plan.words):
            yield technique_line(technique)
            continue
        effect = next((one for one in effects if one.technique == technique.name), None)
        figures = ""
        if effect is not None:
            effects.remove(effect)
            figures = f"{_effect_figures(effect, plan.predicted.step_seconds)}: "
        yield figures + plan.words[number]


def _effect_figures(effect: PredictedEffect, step_seconds: float) -> str:
    """Return the bytes and the time; a time below 0.1 % of the step is free."""
    size = f"{'-' if effect.saved_bytes >= 0 else '+'}{format_bytes(abs(effect.saved_bytes))}"
    seconds = effect.added_seconds
    if abs(seconds) < _FREE * step_seconds:
        return f"{size if effect.saved_bytes else 'peak unchanged'}, free"
    return f"{size}, {'+' if seconds > 0 else '-'}{format_seconds(abs(seconds))}"


def place_lines(report: Report) -> list[str]:
    """Return a line for each technique of the plan with its places, and one on the plan's optimality."""
    plan = report.plan
    return [*map(technique_line, plan.techniques), *sure_lines(plan)] if plan else []


def sure_lines(plan: PlanSummary) -> list[str]:
    """Return a sentence on the gap between the plan and the fastest one, if known."""
    if plan.gap is None:
        return []
    if plan.gap < _PROVEN:
        return ["by prediction, no plan that fits is faster"]
    by = f"{100 * plan.gap:.1f} %"
    return [f"by prediction, no plan that fits is faster by more than {by} of a step"]


def technique_line(technique: Technique) -> str:
    """Return a technique in words: `"recompute (BITWISE, segments 2) on 4 modules: model.layers.0-3"`."""
    options = ", ".join(f"{key} {value}" for key, value in technique.options.items())
    about = f"{technique.equivalence}{', ' if options else ''}{options}"
    return f"{technique.name} ({about}) on {where_of(technique)}"


def where_of(technique: Technique) -> str:
    """Return the places of a technique: `"4 modules: model.layers.0-3"`; operators count as places."""
    if not technique.where:
        return "the whole step"
    noun = "place" if any(":" in where for where in technique.where) else "module"
    noun = "optimizer" if "optimizer" in technique.name else noun
    return f"{counted(len(technique.where), noun)}: {', '.join(runs(technique.where))}"


def runs(paths: Iterable[str]) -> list[str]:
    """Join module paths with consecutive numbers: `layers.0`, `layers.1` -> `layers.0-1`."""
    parted = [re.fullmatch(r"(.*?\.)?(\d{1,9})(\D*)", path, re.DOTALL) or path for path in paths]
    joined: list[str] = []
    for _, group in groupby(enumerate(parted), _run_of):
        members = [part for _, part in group]
        first, last = members[0], members[-1]
        if isinstance(first, str) or isinstance(last, str):
            joined += [part for part in members if isinstance(part, str)]
        elif first[2] == last[2]:
            joined.append(first[0])
        else:
            joined.append(f"{first[1] or ''}{first[2]}-{last[2]}{first[3]}")
    return joined


def _run_of(item: tuple[int, re.Match[str] | str]) -> tuple[str, ...]:
    index, part = item
    if isinstance(part, str):
        return (part,)
    return (part[1] or "", part[3], str(int(part[2]) - index))


def words_of(chosen: Technique, types: Mapping[str, str]) -> str:
    """Return what a technique does and where: `"write results over inputs (overwrite, 7 ReLU)"`."""
    equivalence = "" if chosen.equivalence == "BITWISE" else chosen.equivalence
    options = (f"{k} {v}" for k, v in chosen.options.items() if not k.endswith("_bytes"))
    labels = (chosen.name, equivalence, *options, _places_of(chosen.where, types))
    does = getattr(unit(chosen.name), "does", "")
    return f"{does} ({', '.join(filter(None, labels))})".strip()


def _places_of(where: Sequence[str], types: Mapping[str, str]) -> str:
    """Return `"7 ReLU"`, `"Net.head (Linear)"` or `"2 places of Net.block"`."""
    modules = [_ROLE.split(place, maxsplit=1)[0] for place in where]
    names, kinds = list(dict.fromkeys(modules)), sorted({types.get(path, "") for path in modules})
    if len(names) == 1 and all(kinds) and names == [*where]:
        return names[0] if names[0] == kinds[0] else f"{names[0]}, {kinds[0]}"
    if names == [*where] and all(kinds) and len(kinds) < 3:
        return f"{len(names)} {' and '.join(kinds)}"
    some = ", ".join(first(runs(names), 3, "and {} more"))
    return f"{counted(len(where), 'place')} of {some}" if len(where) > 1 else some
