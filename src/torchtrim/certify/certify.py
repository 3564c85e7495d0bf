"""Certificate of a planned trial against the original, and of the original against itself if they differ."""

from __future__ import annotations

import math
import re
from typing import NamedTuple

import msgspec
import torch

from torchtrim.certify import compare, construction
from torchtrim.certify.compare import (
    KEPT_BY_PYTHON,
    Parting,
    before_update,
    differences,
    has_values,
    largest_difference,
    name_of,
    sample_of,
)
from torchtrim.certify.contest import Contest, attempt, folders, keeping, keeping_other, traced
from torchtrim.certify.rounding import Judgement, judge_in_double
from torchtrim.errors import ApplyFailed, ScriptFailed
from torchtrim.executor.registry import unseen_by
from torchtrim.records.certificate import Certificate, Difference
from torchtrim.records.plan import Plan
from torchtrim.records.trial import Trial
from torchtrim.runner.trials import Progress

_NARROWER = torch.finfo(torch.float32).eps / torch.finfo(torch.float64).eps
_KERNELS = 100.0
"""Between kernels of float32, about 10 units in the last place apart, and TF32 with 8,000."""
NOISE_FACTOR = 2.0  # arbitrary, above the spread among pairs of the original's runs
_CALLS_NAMES = """
    recompute replay overwrite plain_optimizer offload_activations offload_optimizer optimizer_in_backward
    data_parallel low_bit_states
"""
_OF_ROOT = re.compile(r"(?P<root>.+?)(?: \((?P<call>\d+)\))?\.(?P<number>\d+)(?: \(\d+\))?")
_LEFT = "memory:left behind"
_CALLS_AS_BEFORE = frozenset(_CALLS_NAMES.split())


class RelativeDifferences(NamedTuple):
    """Largest relative differences: planned against original, and original against itself.

    `early`: planned against original in the first step that differs, up to its first update of parameters.
    `unlike`: what differs by more than a number, if anything does.
    """

    difference: float
    noise: float
    early: float = 0.0
    unlike: str = ""


def certify(contest: Contest, original: Trial, planned: Trial, progress: Progress) -> Certificate:
    """Return the verdict on a planned trial.

    If bits differ, run the original again, for its differences from itself; if the verdict is not equal, run
    both once more, for the first operator that differs.
    """
    plan, otherwise = contest.planned_request.plan, ""
    if plan is None:
        planned, labels, otherwise = construction.renamed(original, planned)
        contest = contest._replace(renamed=labels)
    found = differences(original, planned)
    if plan is not None and any(one.name not in _CALLS_AS_BEFORE for one in plan.techniques):
        # Such a technique may call modules otherwise, as once for each part of a batch.
        found = [label for label in found if not name_of(label).startswith("call:")]
    found += compare.left_behind(original, planned)
    built: list[str] = []
    if plan is None:
        found, built = construction.built_otherwise(found, original, planned)
        contest = contest._replace(built=frozenset(built))
    judged = Judgement("BITWISE", "every bit of two runs agrees")
    figures = RelativeDifferences(0.0, 0.0)
    if found:
        found, noise, alone, figures = _measure(contest, original, found, progress)
        if found:
            judged = _judge(contest, original, found, noise, figures, progress)
        if alone:
            said = f"{alone} differs between two runs of the original, and is ignored"
            judged = judged._replace(reason=f"{judged.reason}; {said}")
    first = _first(contest, original, found, judged, progress) if found else None
    return Certificate(
        verdict=judged.verdict,
        compared=compare.compared(original, contest.built),
        largest_difference=_finite(figures.difference) if found else 0.0,
        first_difference=first,
        noise=_finite(figures.noise),
        seeds=original.seeds,
        steps=len(original.steps),
        reason=judged.reason,
        coverage=compare.coverage_of(original),
        assumes=_unseen(plan),
        sees=judged.sees,
        otherwise="; ".join(filter(None, (otherwise, construction.said_of(built)))),
    )


def _unseen(plan: Plan | None) -> tuple[str, ...]:
    techniques = plan.techniques if plan is not None else ()
    return tuple(dict.fromkeys(said for one in techniques for said in unseen_by(one)))


def failed(original: Trial, error: Exception) -> Certificate:
    """Return the verdict on a run that raised, unlike the original."""
    said = f"{type(error).__name__}: {error}"
    places = re.findall(r'File "([^"]+)", line (\d+)', getattr(error, "traceback", "") or said)
    path, line = places[-1] if places else ("", "0")
    return Certificate(
        verdict="NOT EQUAL",
        compared=(),
        largest_difference=None,
        first_difference=Difference(
            module="", op="error raised", other_path=path, other_line=int(line)
        ),
        noise=None,
        seeds=original.seeds,
        steps=len(original.steps),
        reason=f"the original runs, and the other fails: {said}",
        coverage=compare.coverage_of(original),
    )


def _without_own(found: list[str], noise: list[str]) -> tuple[list[str], list[str], str]:
    """Remove attributes and variables that differ between two runs of the original, such as times, from the
    plan's differences and the original's own; also return the first of them."""
    own = {name_of(label) for label in noise if name_of(label).startswith(KEPT_BY_PYTHON)}
    left, noise = (
        [label for label in names if name_of(label) not in own] for names in (found, noise)
    )
    return left, noise, next((name_of(label) for label in found if name_of(label) in own), "")


def _cause(found: list[str]) -> str:
    """Return the difference of the first step that explains others: a module's mode, or a hyperparameter if
    only the update differs; else the first."""
    step = found[0].partition("/")[0]
    labels = [label for label in found if label.partition("/")[0] == step]
    quantities = {name_of(label).partition(":")[0] for label in labels}
    causes = [label for label in labels if name_of(label).endswith(".training")]
    if not quantities & {"loss", "output", "gradient"}:
        causes += [label for label in labels if name_of(label).startswith("hyperparameter:")]
    return causes[0] if causes else found[0]


def _finite(figure: float) -> float | None:
    return figure if math.isfinite(figure) else None


def _judge(
    contest: Contest,
    original: Trial,
    found: list[str],
    noise: list[str],
    figures: RelativeDifferences,
    progress: Progress,
) -> Judgement:
    if noise:
        if figures.difference <= NOISE_FACTOR * figures.noise:
            return Judgement(
                "UNDECIDED",
                f"the original does not equal itself ({figures.noise:.1e}, first in {noise[0]}), and "
                f"the plan's difference is within {NOISE_FACTOR:.0f} times that",
            )
        return Judgement(
            "NOT EQUAL",
            f"the plan differs by {figures.difference:.1e}, the original from itself by "
            f"{figures.noise:.1e}",
        )
    exact = [label for label in found if not has_values(label)]
    caused = _cause(found) in exact
    if math.isinf(figures.difference) and not caused:
        return Judgement("NOT EQUAL", figures.unlike)
    if name_of(found[0]) == _LEFT:
        reason = "more memory is live after each step than after the original's"
        return Judgement("NOT EQUAL", reason)
    if exact:
        named = name_of(_cause(found) if caused else exact[0])
        return Judgement("NOT EQUAL", f"quantities without rounding differ, first {named}")
    judged = judge_in_double(contest, original, found, progress)
    if judged.verdict != "ROUNDING":
        return judged
    reason = _fewer_digits(contest, found, judged, figures.early, progress)
    if not reason and figures.early > contest.limit:
        reason = (
            f"before an update it differs by {figures.early:.1e}, which float64 does not show: there the "
            "program may take another path"
        )
    return Judgement("UNDECIDED", reason, judged.sees) if reason else judged


def _fewer_digits(
    contest: Contest, found: list[str], judged: Judgement, early: float, progress: Progress
) -> str:
    """Return why a difference before an update is more than float32 rounds; empty if it is not.

    What float64 explains, at float32's precision, is the first measure, and a perturbed run the second: the
    original may itself compute in bfloat16 in places.
    """
    if early <= max(judged.sees.values(), default=0.0) * _NARROWER:
        return ""
    names = tuple(before_update(sample_of(found)))
    with folders(2) as (plain, moved):
        request = keeping(contest.request, names)
        attempt(contest, False, request, plain, progress, again="plain")
        nudged = msgspec.structs.replace(request, nudged=1)
        attempt(contest, False, nudged, moved, progress, again="nudged")
        own = max(largest_difference(plain, moved, names), torch.finfo(torch.float32).eps)
    if early <= _KERNELS * own:
        return ""
    return (
        f"in float64 both agree, but before an update they differ by {early:.1e}, and one unit in the last "
        f"place changes the original by {own:.1e}: one has fewer digits there, as those of bfloat16 or TF32, "
        "or a formula that loses some"
    )


def _measure(
    contest: Contest, original: Trial, found: list[str], progress: Progress
) -> tuple[list[str], list[str], str, RelativeDifferences]:
    """Run again and keep the values that differ. Return the plan's differences, the original's own, the first
    label removed from both, and the sizes of the differences."""
    names = sample_of(found)
    with folders(3) as (one, two, three):
        request = keeping(contest.request, names, digests=True)
        again = attempt(contest, False, request, one, progress)
        found, noise, alone = _without_own(found, differences(original, again))
        if not found:
            return found, noise, alone, RelativeDifferences(0.0, 0.0)
        all_names = tuple(dict.fromkeys((*sample_of(found), *sample_of(noise))))
        kept = keeping(contest.request, all_names)
        if all_names != names:
            attempt(contest, False, kept, one, progress)
        if noise:
            attempt(contest, False, kept, three, progress, again="three")
        attempt(contest, True, keeping_other(contest, all_names), two, progress)
        figures = RelativeDifferences(
            largest_difference(one, two, all_names),
            largest_difference(one, three, all_names) if noise else 0.0,
            largest_difference(one, two, tuple(before_update(all_names))),
            compare.unlike(one, two, all_names),
        )
        return found, noise, alone, figures


def _first(
    contest: Contest, trial: Trial, found: list[str], judged: Judgement, progress: Progress
) -> Difference:
    shown = [label for label in found if label in judged.beyond] or found
    # Before a difference of another kind or step are those that only round, whose operators would be named.
    traced = judged.verdict == "NOT EQUAL" and _kind_of(shown[0]) == _kind_of(found[0])
    step, _, rest = _cause(shown).partition("/")
    quantity, _, name = rest.partition(":")
    apart = _parting(contest, int(step), progress) if traced else None
    if apart is not None and apart.inputs and quantity in ("output", "loss", "gradient"):
        quantity, name = _of_root("input", apart.inputs)
        return Difference(module=name, op=f"{quantity} in step {int(step) + 1}")
    if quantity == "output":
        quantity, name = _of_root(quantity, name)
    what = f"{quantity} in step {int(step) + 1}"
    if apart is None or apart.spots is None:
        path, line = _line_of(trial, name) if trial.profile is not None else ("", 0)
        return Difference(module=name, op=what, path=path, line=line)
    one, other = apart.spots
    return Difference(
        module=name,
        op=f"{what}{compare.said_of(one, other)}",
        path=one.path,
        line=one.line,
        operator=one.op,
        inside=other.module or one.module,
        other_operator=other.op,
        other_path=other.path,
        other_line=other.line,
    )


def _kind_of(label: str) -> str:
    """Return `"0/parameter"` for `"0/parameter:Net.weight"`."""
    return label.partition(":")[0]


def _of_root(quantity: str, name: str) -> tuple[str, str]:
    """Return the quantity and root of a name such as `"Net (2).1"`: "output [1] of call 2", and "Net"."""
    match = _OF_ROOT.fullmatch(name)
    if match is None:
        return quantity, name
    number = f" [{match['number']}]" if match["number"] != "0" else ""
    call = f" of call {match['call']}" if match["call"] else ""
    return f"{quantity}{number}{call}", match["root"]


def _parting(contest: Contest, step: int, progress: Progress) -> Parting | None:
    with folders(2) as (one, two):
        try:
            original = attempt(contest, False, traced(contest.request, step), one, progress)
            planned = attempt(contest, True, traced(contest.planned_request, step), two, progress)
        except (ApplyFailed, ScriptFailed, RuntimeError):
            return None
    return compare.parting(original, planned, step)


def _line_of(trial: Trial, name: str) -> tuple[str, int]:
    assert trial.profile is not None
    profile = trial.profile
    within = [
        (len(module.path), number)
        for number, module in enumerate(profile.modules)
        if name == module.path or name.startswith(f"{module.path}.")
    ]
    for _, number in sorted(within, reverse=True):
        for index, op in enumerate(profile.operators):
            if op.module == number and (place := profile.place_of(index)) is not None:
                return place.path, place.line
    return "", 0
