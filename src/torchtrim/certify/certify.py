"""Certificate of a planned trial against the original, and of the original against itself if they differ."""

from __future__ import annotations

import math
import re
import shutil
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import NamedTuple

import msgspec

from torchtrim.certify import compare
from torchtrim.certify.compare import GENERATOR, Parting, differences, largest_difference
from torchtrim.errors import ApplyFailed, ScriptFailed
from torchtrim.executor.registry import unseen_by
from torchtrim.records.certificate import Certificate, Difference, Verdict
from torchtrim.records.plan import Plan
from torchtrim.records.trial import Request, Trial
from torchtrim.runner.ranks import folder_of
from torchtrim.runner.script import Script, working_folder
from torchtrim.runner.trials import Progress, Workload, run_trial

NOISE_FACTOR = 2.0  # arbitrary, above the spread among pairs of the original's runs
ROUNDING_LIMIT = 1e-2  # far above what sums in another order change in float32, before an update
SHRINKS_BY = 1e4  # well below 2**29, by which rounding shrinks from float32 to float64
_SURE = 1e-8  # some 5e7 roundings of float64; a larger difference is a bug
_MOST_KEPT = 48  # arbitrary, enough of each quantity and few enough to write quickly
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
    """Comparison of a workload with another workload and request that should give equal results.

    `limit`: largest difference that may be rounding. `jobs`: the job's runs, if both workloads are ranks.
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
    Updates enlarge rounding: Adam's first update depends on the sign of a gradient alone.
    """

    difference: float
    noise: float
    early: float = 0.0


def certify(contest: Contest, original: Trial, planned: Trial, progress: Progress) -> Certificate:
    """Return the verdict on a planned trial.

    If bits differ, run the original again, for its differences from itself; if the verdict is not equal, run
    both once more, for the first operator that differs.
    """
    found = differences(original, planned)
    plan = contest.planned_request.plan
    if plan is not None and any(one.name not in _CALLS_AS_BEFORE for one in plan.techniques):
        # Such a technique may call modules otherwise, as once for each part of a batch.
        found = [label for label in found if not _name(label).startswith("call:")]
    found += compare.left_behind(original, planned)
    verdict: Verdict = "BITWISE"
    figures = RelativeDifferences(0.0, 0.0)
    reason = "every bit of two runs agrees"
    if found:
        found, noise, alone, figures = _measure(contest, original, found, progress)
        if found:
            verdict, reason = _judge(contest, original, found, noise, figures, progress)
        if alone:
            reason += f"; {alone} differs between two runs of the original, and is ignored"
    first = _first(contest, original, _cause(found), verdict, progress) if found else None
    return Certificate(
        verdict=verdict,
        compared=compare.compared(original),
        largest_difference=_finite(figures.difference) if found else 0.0,
        first_difference=first,
        noise=_finite(figures.noise),
        seeds=original.seeds,
        steps=len(original.steps),
        reason=reason,
        coverage=compare.coverage_of(original),
        assumes=_unseen(plan),
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
    """Remove attributes and variables in which two runs of the original differ, such as times, from the
    plan's differences and the original's own; also return the first of them."""
    own = {_name(label) for label in noise if _name(label).startswith(KEPT_BY_PYTHON)}
    left, noise = (
        [label for label in names if _name(label) not in own] for names in (found, noise)
    )
    return left, noise, next((_name(label) for label in found if _name(label) in own), "")


def _cause(found: list[str]) -> str:
    """Return the difference of the first step that explains others: a module's mode, or a hyperparameter if
    only the update differs; else the first."""
    step = found[0].partition("/")[0]
    labels = [label for label in found if label.partition("/")[0] == step]
    quantities = {_name(label).partition(":")[0] for label in labels}
    causes = [label for label in labels if _name(label).endswith(".training")]
    if not quantities & {"loss", "output", "gradient"}:
        causes += [label for label in labels if _name(label).startswith("hyperparameter:")]
    return causes[0] if causes else found[0]


def _name(label: str) -> str:
    return label.partition("/")[2]


def before_update(labels: Sequence[str]) -> Iterator[str]:
    """Yield the labels of the first step, up to the gradients of its first update."""
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
        return "NOT EQUAL", f"tensors, shapes or NaNs differ, first in {found[0]}"
    if figures.early > contest.limit:
        return "NOT EQUAL", f"the difference, {figures.early:.1e}, is too large for rounding"
    if _name(found[0]) == _LEFT:
        return "NOT EQUAL", "more memory is live after each step than after the original's"
    if exact := [label for label in found if not _has_values(label)]:
        return "NOT EQUAL", f"quantities without rounding differ, first {_name(exact[0])}"
    return _judge_in_double(contest, original, found, figures, progress)


def _judge_in_double(
    contest: Contest,
    original: Trial,
    found: list[str],
    figures: RelativeDifferences,
    progress: Progress,
) -> tuple[Verdict, str]:
    """Decide by runs in float64: the first step may differ as far as one rounding changes the original, and
    later differences have to shrink as rounding does."""
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
                "it differs, and the run in float64 that would tell rounding from a bug failed",
            )
        if (beyond := compare.beyond_rounding(one, two, three, names, first)) is not None:
            step, _, name = beyond.name.partition("/")
            return "NOT EQUAL", (
                f"in float64 {name} of step {int(step) + 1} still differs by {beyond.difference:.1e}, while "
                f"one rounding of parameters and inputs changes the original by {beyond.own:.1e}"
            )
        shrunk = largest_difference(one, two, names)
        if shrunk * SHRINKS_BY <= figures.difference:
            return "ROUNDING", (
                f"the difference shrinks from {figures.difference:.1e} to {shrunk:.1e} in float64, as "
                "rounding does"
            )
        own = _own_rounding(contest, nudged, one, four, progress) if shrunk <= _SURE else 0.0
    if shrunk <= NOISE_FACTOR * own and own <= _SURE:
        return "ROUNDING", (
            f"the difference, {shrunk:.1e} in float64, is within the change of the original when its "
            f"parameters are perturbed by one rounding ({own:.1e})"
        )
    return "NOT EQUAL", (
        f"the difference stays at {shrunk:.1e} in float64 ({figures.difference:.1e} before), which "
        "rounding does not"
    )


def _measure(
    contest: Contest, original: Trial, found: list[str], progress: Progress
) -> tuple[list[str], list[str], str, RelativeDifferences]:
    """Run again and keep the values that differ. Return the plan's differences, the original's own, the first
    label removed from both, and the sizes of the differences."""
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
    """Return the change of the original in float64 with perturbed parameters, 0 if that run fails.

    A loss that hardly depends on the parameters, as behind a norm, enlarges rounding.
    """
    try:
        _attempt(contest, False, nudged, folder, progress, again="nudged")
    except (ApplyFailed, ScriptFailed, RuntimeError):
        return 0.0
    return largest_difference(plain, folder, nudged.keep)


def first_quantities(trial: Trial) -> tuple[str, ...]:
    """Return the labels of the first step up to its first update, then of its buffers, parameters and
    optimizer states."""
    computed = ("loss:", "output:", "gradient:")
    steps = (
        [f"{number}/{name}" for name in step.digests if not name.startswith("initial state:")]
        for number, step in enumerate(trial.steps)
        if any(name.startswith(computed) for name in step.digests)
    )
    labels = next(steps, [])
    left = (one for one in labels if compare.is_updated(one) or _name(one).startswith("buffer:"))
    return tuple(dict.fromkeys((*filter(_has_values, before_update(labels)), *left)))


def sample_of(names: list[str]) -> tuple[str, ...]:
    """Return the first labels with values, and others spread over the rest."""
    valued = [name for name in names if _has_values(name)]
    if len(valued) <= _MOST_KEPT:
        return tuple(valued)
    half = _MOST_KEPT // 2
    stride = max((len(valued) - half) // half, 1)
    return (*valued[:half], *valued[half::stride][:half])


def _has_values(name: str) -> bool:
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
    """Run a workload once more. `again` tells a repeated run from the run before."""
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
        yield tuple(stack.enter_context(working_folder()) for _ in range(count))


def _first(
    contest: Contest, trial: Trial, label: str, verdict: Verdict, progress: Progress
) -> Difference:
    step, _, rest = label.partition("/")
    quantity, _, name = rest.partition(":")
    apart = _parting(contest, int(step), progress) if verdict == "NOT EQUAL" else None
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


def _of_root(quantity: str, name: str) -> tuple[str, str]:
    """Return the quantity and root of a name such as `"Net (2).1"`: "output [1] of call 2", and "Net"."""
    match = _OF_ROOT.fullmatch(name)
    if match is None:
        return quantity, name
    number = f" [{match['number']}]" if match["number"] != "0" else ""
    call = f" of call {match['call']}" if match["call"] else ""
    return f"{quantity}{number}{call}", match["root"]


def _parting(contest: Contest, step: int, progress: Progress) -> Parting | None:
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


class Jobs:
    """Cache of a job's runs, each with its own folder below `folder`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._known: dict[tuple[Script, bytes, str], tuple[Path, Trial | Exception]] = {}

    def run(
        self, script: Script, request: Request, what: str, folder: Path, progress: Progress
    ) -> Trial:
        """Return the trial of the rank `script.only`, with its kept values in `folder`.

        `what` distinguishes runs that repeat each other. Raises the error of the run for each rank.
        """
        key = script._replace(only=-1), msgspec.json.encode(request), what
        if key not in self._known:
            own = self._folder / str(len(self._known))
            own.mkdir()
            try:
                self._known[key] = own, run_trial(key[0], request, own, progress)
            except Exception as error:
                self._known[key] = own, error
        own, trial = self._known[key]
        if isinstance(trial, Exception):
            raise trial
        shutil.copytree(folder_of(own, script.only), folder, dirs_exist_ok=True)
        return trial.ranks[script.only]
