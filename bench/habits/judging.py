"""What is wrong with torchtrim on one script: each verb beside the plain run."""

from __future__ import annotations

import itertools
import json
import random
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from msgspec.structs import replace

from bench.habits.blocks import AT_RANDOM
from bench.habits.customs import ENDS
from bench.habits.loops import SOURCES
from bench.habits.running import Ended, kept, plain, verb
from bench.habits.script import PLAIN, Habits, text_of
from bench.habits.truth import allocated

_SCRIPT = "train.py"
_FRAME = re.compile(r'^ *File "(.+?)"', re.MULTILINE)
_NEEDED = re.compile(r"--memory (\d+) or more")
_REFUSED = re.compile(r"^error: .*(cannot|was made for|supports|from the plan)", re.MULTILINE)
_TRUTH = 1e-3
"""Share of a peak that the allocator's may differ by: allocations of other threads at the moment."""
_ERROR = 1
"""The exit code of a script that ends with an exception."""
_TOTAL = 3
"""Steps that `--steps 1` needs."""
_NUMBER = re.compile(r"-?\d+\.\d+")
_UNKNOWN = (2,)
"""A dry run has no numbers, so a script that branches on them is refused."""
_ESTIMATE = 0.01
_BOUND = "depends on computed values; counted as"
_DIFFER = "the planned steps differ"
_PEAK = 0.005
"""Share of a peak by which a prediction may be off."""


class Fault(NamedTuple):
    """A kind of fault, and what shows it."""

    kind: str
    shown: str


class Case:
    """A script in a folder of its own, and what its plain run did."""

    def __init__(self, habits: Habits, folder: Path, checkpointed: int = 0) -> None:
        self.habits = habits
        self.folder = folder
        self.script = folder / _SCRIPT
        folder.mkdir(parents=True)
        self.script.write_text(text_of(habits, checkpointed))
        (folder / "helper.py").write_text('NAME = "helper"\n')
        self._runs = 0

    def plain(self) -> Ended:
        return plain(self.script, self.fresh())

    def is_sound(self, original: Ended) -> bool:
        """Return True if the script ends as its habit says, not by an error of torch with that code."""
        code = ENDS[self.habits.one["end"]].code
        if original.code != code or code != _ERROR:
            return original.code == code
        one = {**self.habits.one, "end": PLAIN["end"]}
        return Case(replace(self.habits, one=one), self.folder / "ended").plain().code == 0

    def kept(self) -> str:
        return kept(self.script, self.fresh())

    def verb(self, name: str, *words: str, exits: bool = False) -> Ended:
        return verb(self.fresh(), name, str(self.script), *words, exits=exits)

    def fresh(self) -> Path:
        self._runs += 1
        made = self.folder / f"run-{self._runs}"
        made.mkdir()
        return made


def report_of(ended: Ended) -> dict[str, Any]:
    """The report that a verb printed as JSON, empty if it printed none."""
    try:
        found: dict[str, Any] = json.loads(ended.output)
    except ValueError:
        return {}
    return found


def may_fail(habits: Habits) -> bool:
    """Return True if the script rightly ends before torchtrim has seen its steps."""
    if habits.one["around"] == "a thread":
        return True
    end = ENDS[habits.one["end"]]
    return end.code != 0 and bool(end.after) and habits.last < _TOTAL


def ill(name: str, ended: Ended, good: tuple[int, ...]) -> Iterator[Fault]:
    """Yield what is wrong with the end of a verb, whatever it found."""
    if ended.code not in good:
        yield Fault(f"{name} exits with {ended.code}", _tail(ended.errors))
    elif shows_ours(ended.errors):
        yield Fault(f"{name} shows a traceback of torchtrim", _tail(ended.errors))


def shows_ours(errors: str) -> bool:
    """Return True if a traceback ends in torchtrim: frames outside of the script's stand in its own too."""
    for trace in errors.split("Traceback (most recent call last)"):
        inner = itertools.takewhile(
            lambda path: Path(path).name != _SCRIPT, reversed(_FRAME.findall(trace))
        )
        if any("/torchtrim/" in path for path in inner):
            return True
    return False


def _tail(text: str) -> str:
    return "\n".join(text.strip().splitlines()[-12:])


def faults(habits: Habits, folder: Path, rng: random.Random) -> Iterator[Fault]:
    """Yield what is wrong under `diagnose`, under `plan` or `optimize`, and under `run` of that plan."""
    case = Case(habits, folder)
    original = case.plain()
    if not case.is_sound(original):
        yield Fault("plain", _tail(original.errors))
        return
    good = (0, 3) if may_fail(habits) else (0,)
    allow = rng.choice(("bitwise", "rounding"))
    budget = rng.choice(("60%", "80%"))
    words = (
        "--memory",
        budget,
        "--allow",
        allow,
        "--steps",
        "1",
        "--json",
        "--out",
        str(folder / "o"),
    )
    name = rng.choice(("plan", "plan", "plan", "optimize"))
    fitted = case.verb(name, *words)
    if name == "plan" and fitted.code == 1 and (needed := _NEEDED.search(fitted.errors)):
        fitted = case.verb(name, "--memory", needed[1], *words[2:])
    yield from ill(name, fitted, (*good, 1))
    report = report_of(fitted)
    if name == "optimize":
        diagnosed = case.verb("diagnose", "--steps", "1", "--json", "--out", str(folder / "d"))
        yield from ill("diagnose", diagnosed, good)
        yield from _of_report(report, habits)
        yield from _of_truth(case, report_of(diagnosed), report)
        yield from _by_hand(case, original, report_of(diagnosed), report)
    plan = folder / "o" / "plan.toml"
    if plan.exists():
        ran = case.verb("run", "--plan", str(plan), exits=True)
        if name == "plan" and ran.code == 2 and _REFUSED.search(ran.errors):
            return  # a plan that nobody has run may turn out not to fit, and says so
        yield from _of_run(original, ran, report)


def _of_truth(case: Case, diagnosed: dict[str, Any], fitted: dict[str, Any]) -> Iterator[Fault]:
    """Compare peaks with the allocator's: the highest after the first step, and that of the longest.

    Not of scripts whose worker processes have batches ready or not.
    """
    if SOURCES[case.habits.one["source"]].workers:
        return
    highest, longest = (each.get("original", {}).get("peak_bytes") for each in (diagnosed, fitted))
    peaks = _allocated(case)
    if len(peaks) < 2 or not highest or not longest:
        return
    shown = f"{highest} diagnosed, {longest} optimized, {peaks} by torch's allocator"
    if abs(highest / max(peaks[1:_TOTAL]) - 1) > _TRUTH:
        yield Fault("wrong peak", shown)
    elif min(abs(longest / peak - 1) for peak in peaks[1:]) > _TRUTH:
        yield Fault("wrong peak of the longest step", shown)


def _allocated(case: Case) -> list[int]:
    """Return the allocator's peaks of the first steps, without a profiler of the script's own."""
    folder = case.fresh()
    if "profiler" in case.habits.one["around"]:
        one = {**case.habits.one, "around": PLAIN["around"]}
        case = Case(replace(case.habits, one=one), folder / "unprofiled")
    return allocated(case.script, folder)


def _by_hand(
    given: Case,
    original: Ended,
    diagnosed: dict[str, Any],
    report: dict[str, Any],
) -> Iterator[Fault]:
    """Compare a refusal's floor with the peaks of checkpointed blocks, where these compute and keep the same.

    A loop that keeps what it made has higher peaks in the step that `optimize` measures.
    """
    floor = report.get("floor_bytes")
    if not floor or not diagnosed:
        return
    floor -= max(report["original"]["peak_bytes"] - diagnosed["original"]["peak_bytes"], 0)
    for every in (1, 2):
        case = Case(given.habits, given.folder / f"by-hand-{every}", every)
        if case.plain().output != original.output or case.kept() != given.kept():
            continue  # such as a default list, to which a checkpoint appends twice
        words = ("--steps", "1", "--json", "--out", str(case.folder / "d"))
        found = report_of(case.verb("diagnose", *words)).get("original")
        if found and found["peak_bytes"] < floor * (1 - _PEAK):
            shown = f"{floor} refused, {found['peak_bytes']} with every {every} checkpointed"
            yield Fault("floor above a person's plan", shown)


def faults_of_verbs(habits: Habits, folder: Path, rng: random.Random) -> Iterator[Fault]:
    """Yield what is wrong under every verb that takes a script, at a budget that is drawn."""
    case = Case(habits, folder)
    original = case.plain()
    if not case.is_sound(original):
        yield Fault("plain", _tail(original.errors))
        return
    good = (0, 3) if may_fail(habits) else (0,)
    own, path = ("--steps", "1", "--json"), str(case.script)
    diagnosed = case.verb("diagnose", *own, "--out", str(folder / "d"))
    yield from ill("diagnose", diagnosed, good)
    estimated = case.verb("estimate", "--json", "--out", str(folder / "e"))
    yield from ill("estimate", estimated, (*good, *_UNKNOWN))
    if habits.one["block"] != AT_RANDOM:  # an estimate draws other numbers, so other depths
        yield from _of_estimate(case, report_of(diagnosed), report_of(estimated))
    yield from ill("verify A A", case.verb("verify", path, *own, "--out", str(folder / "v")), good)
    yield from ill("lint", case.verb("lint", "--format", "json"), (0, 1))
    if SOURCES[habits.one["source"]].loader:
        words = ("--find-batch", "--memory", "80%", *own, "--out", str(folder / "b"))
        yield from ill("find-batch", case.verb("plan", *words), (*good, 1, *_UNKNOWN))
    budget, allow = rng.choice(("60%", "80%")), rng.choice(("bitwise", "rounding"))
    words = ("--memory", budget, "--allow", allow, *own, "--out", str(folder / "o"))
    fitted = case.verb("optimize", *words)
    yield from ill(f"optimize {budget} {allow}", fitted, (*good, 1))
    report = report_of(fitted)
    yield from _of_report(report, habits)
    yield from _of_truth(case, report_of(diagnosed), report)
    yield from _by_hand(case, original, report_of(diagnosed), report)
    if (plan := folder / "o" / "plan.toml").exists():
        ran = case.verb("run", "--plan", str(plan), exits=True)
        yield from _of_run(original, ran, report)
        words = ("--plan", str(plan), *own, "--out", str(folder / "p"))
        yield from ill("verify --plan", case.verb("verify", *words), good)


def _of_estimate(
    case: Case, diagnosed: dict[str, Any], estimated: dict[str, Any]
) -> Iterator[Fault]:
    """Compare an estimate with the measured peak, or with a later one of a loop that keeps what it made.

    An estimate that takes unknown numbers of elements as the most there can be is one from above.
    """
    measured = (diagnosed.get("original") or {}).get("peak_bytes")
    predicted = (estimated.get("original") or {}).get("peak_bytes")
    if not (measured and predicted) or abs(predicted / measured - 1) <= _ESTIMATE:
        return
    if predicted > measured and any(_BOUND in note for note in estimated.get("notes", ())):
        return
    peaks = _allocated(case)[1:]
    if all(abs(predicted / peak - 1) > _ESTIMATE for peak in peaks):
        yield Fault("estimate", f"{predicted} estimated, {measured} measured, then {peaks}")


def _of_report(report: dict[str, Any], habits: Habits) -> Iterator[Fault]:
    """Judge a certificate and a prediction.

    Where steps take other ways, the one that was recorded is predicted, and a higher one is to be told.
    """
    certificate = report.get("certificate") or {}
    if certificate.get("verdict") in ("NOT EQUAL", "UNDECIDED"):
        yield Fault(certificate["verdict"], str(certificate.get("reason"))[:600])
    planned = report.get("planned")
    if planned and (plan := report.get("plan")):
        predicted = (plan.get("predicted") or {}).get("peak_bytes") or planned["peak_bytes"]
        measured = planned["peak_bytes"]
        if habits.one["block"] == AT_RANDOM and any(_DIFFER in note for note in report["notes"]):
            measured = planned["tracked_peak_bytes"]
        if abs(measured / predicted - 1) > _PEAK:
            yield Fault("prediction", f"{predicted} predicted, {measured} measured")


def _of_run(original: Ended, ran: Ended, report: dict[str, Any]) -> Iterator[Fault]:
    if ran.code != original.code:
        yield Fault(f"run exits with {ran.code} for {original.code}", _tail(ran.errors))
    elif shows_ours(ran.errors):
        yield Fault("run shows a traceback of torchtrim", _tail(ran.errors))
    elif not _same(original.output, ran.output, report):
        lines = itertools.zip_longest(original.output.split("\n"), ran.output.split("\n"))
        first = next(pair for pair in lines if pair[0] != pair[1])
        yield Fault("run prints something else", f"{first[0]!r} and {first[1]!r}")


def _same(one: str, other: str, report: dict[str, Any]) -> bool:
    if one == other:
        return True
    certificate = report.get("certificate") or {}
    if certificate.get("verdict") == "BITWISE" or _NUMBER.sub("#", one) != _NUMBER.sub("#", other):
        return False
    pairs = zip(_NUMBER.findall(one), _NUMBER.findall(other), strict=True)
    return all(abs(float(a) - float(b)) <= 1e-2 * max(1.0, abs(float(a))) for a, b in pairs)
