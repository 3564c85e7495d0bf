"""Original and planned -> certificate. Where they differ, the original is compared with itself too."""

from __future__ import annotations

import math
import re
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import NamedTuple

import msgspec

from torchtrim.certify.compare import (
    GENERATOR,
    Beyond,
    Parting,
    beyond_rounding,
    compared,
    coverage_of,
    differences,
    is_updated,
    largest_difference,
    left_behind,
    parting,
    said_of,
)
from torchtrim.errors import ApplyFailed, ScriptFailed
from torchtrim.records.certificate import Certificate, Difference, Verdict
from torchtrim.records.trial import Request, Trial, TrialStep
from torchtrim.runner.ranks import folder_of
from torchtrim.runner.script import Script
from torchtrim.runner.trials import Progress, Workload, run_trial

NOISE_FACTOR = 2.0
ROUNDING_LIMIT = 1e-2
SHRINKS_BY = 1e4
_SURE = 1e-8
"""No difference above it is one of float64's rounding."""
_MOST_KEPT = 48
_CALLS_NAMES = """
    recompute replay overwrite plain_optimizer offload_activations offload_optimizer optimizer_in_backward
    data_parallel low_bit_states
"""
_OF_ROOT = re.compile(r"(?P<root>.+?)(?: \((?P<call>\d+)\))?\.(?P<number>\d+)(?: \(\d+\))?")
_LEFT = "memory:left behind"
_CALLS_AS_BEFORE = frozenset(_CALLS_NAMES.split())
KEPT_BY_PYTHON = ("attribute:", "script state:", GENERATOR)
_COUNTED = ("random state:", "step:", "hyperparameter:", "call:", "exception:", "memory:")


class Contest(NamedTuple):
    """A comparison: a workload, and the workload and request that should equal it.

    `limit`: above it no difference is taken for rounding. `jobs`: the runs of a job, where both are a rank.
    """

    original: Workload
    planned: Workload
    request: Request
    planned_request: Request
    limit: float = ROUNDING_LIMIT
    jobs: Jobs | None = None


class RelativeDifferences(NamedTuple):
    """Largest relative differences: planned against original, and original against itself.

    `early`: planned against original in the first step that differs, up to its first update of parameters.
    Updates enlarge rounding: the first of Adam takes but the sign of a gradient.
    """

    difference: float
    noise: float
    early: float = 0.0


def certify(contest: Contest, original: Trial, planned: Trial, progress: Progress) -> Certificate:
    """The verdict on a planned trial.

    A planned run that gives the original's every bit has repeated it, and no more is run. Where bits differ,
    the original is run again, for what it differs from itself; and where the verdict is not that it is equal,
    both once more, for the operator at which they part.
    """
    found = _counted(contest, differences(original, planned)) + left_behind(original, planned)
    verdict: Verdict = "BITWISE"
    figures = RelativeDifferences(0.0, 0.0)
    reason = "every bit of two runs agrees"
    if found:
        found, noise, alone, figures = _measure(contest, original, found, progress)
        if found:
            verdict, reason = _judge(contest, original, found, noise, figures, progress)
        reason += (
            f"; {alone} differs between two runs of the original, and counts for nothing"
            if alone
            else ""
        )
    return Certificate(
        verdict=verdict,
        compared=compared(original),
        largest_difference=_finite(figures.difference) if found else 0.0,
        first_difference=_first(contest, original, _cause(found), verdict, progress)
        if found
        else None,
        noise=_finite(figures.noise),
        seeds=original.seeds,
        steps=len(original.steps),
        reason=reason,
        coverage=coverage_of(original),
    )


def _counted(contest: Contest, found: list[str]) -> list[str]:
    """Without counts of calls where a technique calls modules otherwise, as once for each part of a batch."""
    plan = contest.planned_request.plan
    if plan is None or all(one.name in _CALLS_AS_BEFORE for one in plan.techniques):
        return found
    return [one for one in found if not _name(one).startswith("call:")]


def failed(original: Trial, error: Exception) -> Certificate:
    """The verdict on a run that raised where the original did not."""
    said = f"{type(error).__name__}: {error}"
    return Certificate(
        verdict="NOT EQUAL",
        compared=(),
        largest_difference=None,
        first_difference=_raised(getattr(error, "traceback", "") or said),
        noise=None,
        seeds=original.seeds,
        steps=len(original.steps),
        reason=f"the original runs, and the other fails: {said}",
        coverage=coverage_of(original),
    )


def _raised(trace: str) -> Difference:
    """The exception, at the innermost line that the text of a traceback names."""
    places = re.findall(r'File "([^"]+)", line (\d+)', trace)
    path, line = places[-1] if places else ("", "0")
    return Difference(module="", op="error raised", other_path=path, other_line=int(line))


def _without_own(found: list[str], noise: list[str]) -> tuple[list[str], list[str], str]:
    """What differs, and what of the original does, without attributes and variables that no two runs of the
    original share, such as times; and the first of those."""
    own = {_name(one) for one in noise if _name(one).startswith(KEPT_BY_PYTHON)}
    left, noise = ([one for one in names if _name(one) not in own] for names in (found, noise))
    return left, noise, next((_name(one) for one in found if _name(one) in own), "")


def _cause(found: list[str]) -> str:
    """The difference of the first step that explains others: a module's mode, a
    setting where only the update differs; else the first."""
    step = found[0].partition("/")[0]
    labels = [one for one in found if one.partition("/")[0] == step]
    quantities = {_name(one).partition(":")[0] for one in labels}
    for one in labels:
        name = _name(one)
        if name.endswith(".training"):
            return one
    if not quantities & {"loss", "output", "gradient"}:
        return next((one for one in labels if _name(one).startswith("hyperparameter:")), found[0])
    return found[0]


def _name(label: str) -> str:
    return label.partition("/")[2]


def before_update(labels: Sequence[str]) -> Iterator[str]:
    """Those of the first step among these, as far as the gradients of its first update."""
    first = labels[0].partition("/")[0] if labels else ""
    graded = False
    for label in labels:
        step, _, name = label.partition("/")
        is_gradient = name.startswith("gradient:")
        if step != first or (graded and not is_gradient):
            return
        graded = graded or is_gradient
        yield label


def _finite(figure: float) -> float | None:
    """The figure, None where shapes or NaNs differ and there is none."""
    return figure if math.isfinite(figure) else None


def _judge(
    contest: Contest,
    original: Trial,
    found: list[str],
    noise: list[str],
    figures: RelativeDifferences,
    progress: Progress,
) -> tuple[Verdict, str]:
    if noise:
        if figures.difference <= NOISE_FACTOR * figures.noise:
            return "UNDECIDED", (
                f"the original does not equal itself ({figures.noise:.1e}, first in {noise[0]}), and "
                f"the plan's difference is within {NOISE_FACTOR:.0f} times that"
            )
        return "NOT EQUAL", (
            f"the plan differs by {figures.difference:.1e}, the original from itself by "
            f"{figures.noise:.1e}"
        )
    if math.isinf(figures.difference):
        return "NOT EQUAL", f"what is there, a shape or a NaN differs, first in {found[0]}"
    if figures.early > contest.limit:
        return "NOT EQUAL", f"the difference, {figures.early:.1e}, is too large for rounding"
    if _name(found[0]) == _LEFT:
        return "NOT EQUAL", "more is alive after each step than after the original's"
    if whole := [name for name in found if not _has_values(name)]:
        return "NOT EQUAL", f"what has no rounding differs, first {whole[0].partition('/')[2]}"
    return _judge_in_double(contest, original, found, figures, progress)


def _judge_in_double(
    contest: Contest,
    original: Trial,
    found: list[str],
    figures: RelativeDifferences,
    progress: Progress,
) -> tuple[Verdict, str]:
    """Whether what differs is rounding: the first step in float64 beside what one rounding does to it there,
    and the rest by how much less it differs in float64."""
    first = first_quantities(original)
    names = tuple(dict.fromkeys((*sample_of(found), *first)))
    plain, planned = (
        _keeping(one, names, double=True) for one in (contest.request, contest.planned_request)
    )
    nudged = msgspec.structs.replace(plain, nudged=True, round_trip=False)
    short = msgspec.structs.replace(nudged, warmup=max(plain.warmup, 1), steps=0)
    with _folders(4) as (one, two, three, four):
        try:
            _attempt(contest, False, plain, one, progress)
            _attempt(contest, True, planned, two, progress)
            _attempt(contest, False, short, three, progress, again="nudged")
        except (ApplyFailed, ScriptFailed, RuntimeError):
            return (
                "NOT EQUAL",
                "it differs, and could not be run in float64 to tell rounding from a bug",
            )
        if (beyond := beyond_rounding(one, two, three, names, first)) is not None:
            return "NOT EQUAL", _said_beyond(beyond)
        shrunk = largest_difference(one, two, names)
        if shrunk * SHRINKS_BY <= figures.difference:
            return "ROUNDING", (
                f"the difference shrinks from {figures.difference:.1e} to {shrunk:.1e} in float64, as "
                "rounding does"
            )
        own = _own_rounding(contest, nudged, one, four, progress) if shrunk <= _SURE else 0.0
    if shrunk <= NOISE_FACTOR * own and own <= _SURE:
        return "ROUNDING", (
            f"the difference, {shrunk:.1e} in float64, is within what the original itself changes by when "
            f"its parameters are one rounding away ({own:.1e})"
        )
    return "NOT EQUAL", (
        f"the difference stays at {shrunk:.1e} in float64 ({figures.difference:.1e} before), which "
        "rounding does not"
    )


def _said_beyond(beyond: Beyond) -> str:
    step, _, name = beyond.name.partition("/")
    return (
        f"in float64 {name} of step {int(step) + 1} still differs by {beyond.difference:.1e}, where one "
        f"rounding of parameters and inputs changes the original by {beyond.own:.1e}"
    )


def _measure(
    contest: Contest, original: Trial, found: list[str], progress: Progress
) -> tuple[list[str], list[str], str, RelativeDifferences]:
    """Run again and keep what differs: `(what differs, what of the original does not repeat itself, the first
    that is left out of both, by how much)`."""
    names = sample_of(found)
    with _folders(3) as (one, two, three):
        again = _attempt(contest, False, _keeping(contest.request, names), one, progress)
        found, noise, alone = _without_own(found, differences(original, again))
        if not found:
            return found, noise, alone, RelativeDifferences(0.0, 0.0)
        all_names = tuple(dict.fromkeys((*sample_of(found), *sample_of(noise))))
        kept = _keeping(contest.request, all_names)
        if all_names != names:
            _attempt(contest, False, kept, one, progress)
        if noise:
            _attempt(contest, False, kept, three, progress, again="three")
        _attempt(contest, True, _keeping(contest.planned_request, all_names), two, progress)
        figures = RelativeDifferences(
            largest_difference(one, two, all_names),
            largest_difference(one, three, all_names) if noise else 0.0,
            largest_difference(one, two, tuple(before_update(all_names))),
        )
        return found, noise, alone, figures


def _own_rounding(
    contest: Contest, nudged: Request, plain: Path, folder: Path, progress: Progress
) -> float:
    """By how much the original changes in float64 when its parameters do by one rounding; 0 if it cannot
    run so. A loss that hardly depends on the parameters, as behind a norm, enlarges rounding."""
    try:
        _attempt(contest, False, nudged, folder, progress, again="nudged")
    except (ApplyFailed, ScriptFailed, RuntimeError):
        return 0.0
    return largest_difference(plain, folder, nudged.keep)


def first_quantities(trial: Trial) -> tuple[str, ...]:
    """What the first step computes up to its first update, and what it leaves in buffers, parameters and
    optimizers."""
    number, step = next(
        ((n, one) for n, one in enumerate(trial.steps) if any(map(_is_computed, one.digests))),
        (0, TrialStep()),
    )
    labels = [f"{number}/{name}" for name in step.digests if not name.startswith("initial state:")]
    left = (one for one in labels if is_updated(one) or _name(one).startswith("buffer:"))
    return tuple(dict.fromkeys((*filter(_has_values, before_update(labels)), *left)))


def _is_computed(name: str) -> bool:
    return name.startswith(("loss:", "output:", "gradient:"))


def sample_of(names: list[str]) -> tuple[str, ...]:
    """The first of those that have values, and others spread over the rest."""
    valued = [name for name in names if _has_values(name)]
    if len(valued) <= _MOST_KEPT:
        return tuple(valued)
    half = _MOST_KEPT // 2
    stride = max((len(valued) - half) // half, 1)
    return (*valued[:half], *valued[half::stride][:half])


def _has_values(name: str) -> bool:
    """Whether it is of tensors: the states of random generators, settings and the count of steps are not."""
    if _name(name).startswith((*_COUNTED, GENERATOR)):
        return False
    if _name(name).startswith(KEPT_BY_PYTHON):
        return name.rpartition(".")[2].isdigit()
    return True


def _keeping(request: Request, names: tuple[str, ...], *, double: bool = False) -> Request:
    return msgspec.structs.replace(request, keep=names, double=double, measured=False)


def _attempt(
    contest: Contest,
    planned: bool,
    request: Request,
    folder: Path,
    progress: Progress,
    again: str = "",
) -> Trial:
    """One more run. `again` names one that repeats another."""
    workload = contest.planned if planned else contest.original
    what = "looking closer, in float64" if request.double else "looking closer"

    def tell(text: str) -> None:
        progress(f"{what}: {text}")

    if contest.jobs is None or not isinstance(workload, Script):
        return run_trial(workload, request, folder, tell)
    return contest.jobs.run(workload, request, f"{planned} {again}", folder, tell)


@contextmanager
def _folders(count: int) -> Iterator[tuple[Path, ...]]:
    with ExitStack() as stack:
        yield tuple(
            Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="torchtrim-")))
            for _ in range(count)
        )


def _first(
    contest: Contest, trial: Trial, label: str, verdict: Verdict, progress: Progress
) -> Difference:
    """The first difference: the quantity, and where the two part in that step."""
    step, _, rest = label.partition("/")
    quantity, _, name = rest.partition(":")
    found = _parting(contest, int(step), progress) if verdict == "NOT EQUAL" else None
    if found is not None and found.inputs and quantity in ("output", "loss", "gradient"):
        quantity, name = _of_root("input", found.inputs)
        return Difference(module=name, op=f"{quantity} in step {int(step) + 1}")
    if quantity == "output":
        quantity, name = _of_root(quantity, name)
    what = f"{quantity} in step {int(step) + 1}"
    if found is None or found.spots is None:
        path, line = _line_of(trial, name) if trial.profile is not None else ("", 0)
        return Difference(module=name, op=what, path=path, line=line)
    one, other = found.spots
    return Difference(
        module=name,
        op=f"{what}{said_of(one, other)}",
        path=one.path,
        line=one.line,
        operator=one.op,
        inside=other.module or one.module,
        other_operator=other.op,
        other_path=other.path,
        other_line=other.line,
    )


def _of_root(quantity: str, name: str) -> tuple[str, str]:
    """Which input or output of which root a name such as `"Net (2).1"` is, of its second call the second."""
    match = _OF_ROOT.fullmatch(name)
    if match is None:
        return quantity, name
    number = f" [{match['number']}]" if match["number"] != "0" else ""
    call = f" of call {match['call']}" if match["call"] else ""
    return f"{quantity}{number}{call}", match["root"]


def _parting(contest: Contest, step: int, progress: Progress) -> Parting | None:
    """Where both part in a step, each run once more; None if that cannot be."""
    traced = [
        msgspec.structs.replace(_keeping(r, ()), traced=step, steps=max(step - r.warmup, 1))
        for r in (contest.request, contest.planned_request)
    ]
    with _folders(2) as (one, two):
        try:
            original = _attempt(contest, False, traced[0], one, progress)
            planned = _attempt(contest, True, traced[1], two, progress)
        except (ApplyFailed, ScriptFailed, RuntimeError):
            return None
    return parting(original, planned, step)


def _line_of(trial: Trial, name: str) -> tuple[str, int]:
    """Where the module that a name begins with was called."""
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


class Jobs:
    """Keeps what each run left, in a folder of its own below `folder`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._known: dict[tuple[Script, bytes, str], tuple[Path, Trial | Exception]] = {}

    def run(
        self, script: Script, request: Request, what: str, folder: Path, progress: Progress
    ) -> Trial:
        """The trial of the rank `script.only`, with what it kept in `folder`.

        `what` tells apart runs that are to be made anew though nothing in them differs. Raises what the run
        raised, for each rank that asks.
        """
        key = script._replace(only=-1), msgspec.json.encode(request), what
        if key not in self._known:
            self._known[key] = self._ran(key[0], request, progress)
        own, found = self._known[key]
        if isinstance(found, Exception):
            raise found
        shutil.copytree(folder_of(own, script.only), folder, dirs_exist_ok=True)
        return found.ranks[script.only]

    def _ran(
        self, script: Script, request: Request, progress: Progress
    ) -> tuple[Path, Trial | Exception]:
        own = self._folder / str(len(self._known))
        own.mkdir()
        try:
            return own, run_trial(script, request, own, progress)
        except Exception as error:
            return own, error
