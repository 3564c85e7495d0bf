"""The whole loop: run, plan for a budget, run planned, correct the plan by the measurement, verify."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import NamedTuple

import msgspec
from msgspec.structs import replace

from torchtrim.certify.certify import Contest
from torchtrim.certify.variants import as_asked, asked_of, by_hand, certify_ranks, limit_of
from torchtrim.core.units import format_bytes
from torchtrim.errors import ApplyFailed, InfeasibleBudget, PlannedStepFailed, Unsupported
from torchtrim.executor.apply import sha256_of
from torchtrim.executor.export import exported
from torchtrim.executor.overheads import overheads
from torchtrim.executor.registry import exportable, names, technique
from torchtrim.planner.pins import KEEP
from torchtrim.planner.planner import Planner
from torchtrim.planner.variants import Planners, Variant
from torchtrim.records.budget import Budget, MemoryKind, MemoryLimit
from torchtrim.records.certificate import Certificate
from torchtrim.records.figures import Lever
from torchtrim.records.finding import EQUIVALENCES
from torchtrim.records.plan import Plan
from torchtrim.records.terms import BITWISE, EVERYTHING, Terms, allowance
from torchtrim.records.trial import Request, Trial
from torchtrim.runner.script import Script, working_folder
from torchtrim.runner.trials import Progress, Workload, run_trial
from torchtrim.workflows.optimize.levers import (
    LEAST_SAVING,
    SHARD,
    Reached,
    levers_of,
    may_shard,
    refusals,
    with_shard,
)
from torchtrim.workflows.optimize.trials import (
    NOTHING,
    Choice,
    MeasuredPlan,
    PlanOutcome,
    TimedPlan,
    broken_in,
    broken_technique,
    check_named,
    choices,
    failing_places,
    failure_note,
    helped_by,
    key_of,
    measured,
    measured_names,
    note_on,
    nothing_helps,
    of_techniques,
    others,
    pinned_choice,
    plans_below,
    quickest,
    recorded,
    semantic_names,
    split_pins,
    suspects,
    well_used,
    without_places,
)

_ROUNDS = 3
_TIMES = 2
_ALONE = {"micro_batch", "optimizer_in_backward"}
"""Not for a job of several ranks, which exchange gradients once, when backward has made them."""
_RANK = EQUIVALENCES.index


class Fit(NamedTuple):
    """All that fitting a workload gave. `planned` and `certificate` are None where nothing is changed.

    `missed` is there where the budget cannot be met: the plan then is that with the smallest peak, and
    `levers` say what each technique would reach.
    """

    original: Trial
    budget: Budget
    plan: Plan
    planned: Trial | None
    certificate: Certificate | None
    notes: tuple[str, ...]
    missed: InfeasibleBudget | None = None
    levers: tuple[Lever, ...] = ()


class Fitting:
    """Fits one workload. Every method runs it, and leaves nothing behind.

    The original is run once, however many budgets are tried; where its steps differ in length, once more to
    record the longest. Every plan keeps to the terms.
    """

    def __init__(
        self,
        workload: Workload,
        request: Request,
        progress: Progress,
        terms: Terms = BITWISE,
    ) -> None:
        self.workload = workload
        self._terms = terms
        self._allowed = allowance(terms.allow)
        check_named(self._allowed)
        self._pins, self._measured_pins = split_pins(terms.pins)
        unwritable = {*names()} - {*exportable(), *self._pins} if terms.exports else set()
        self._exclude = (*terms.exclude, *sorted(unwritable))
        self._request = request
        self._progress = progress
        self.original: Trial | None = None
        self._dropped: set[str] = set()
        self._last: tuple[str, ...] = ()
        self._planners: dict[tuple[int, str, frozenset[str]], Planner | Planners] = {}
        self._recorded: dict[tuple[int, str], Trial] = {}
        self._known: dict[tuple[str, MemoryKind], int] = {}
        self.notes: list[str] = []

    def observe(self) -> Trial:
        """The original's trial."""
        if self.original is None:
            request = msgspec.structs.replace(self._request, times=_TIMES)
            self.original = with_overheads(self._run(request, "original"))
        return self.original

    def observe_longest(self) -> Trial:
        """The original's trial in which the step with the highest peak is the recorded one."""
        original = self.observe()
        longest = longest_step(original)
        if longest is not None:
            self.notes.append(uneven_note(original))
            self._request = recording(self._request, longest)
            trial = self._run(self._request, "original, its longest step")
            self.original = original = with_overheads(trial)
        return original

    def planner(self, original: Trial, only: str = "") -> Planner | Planners:
        """A planner for the observed step, without the places that were dropped.

        `only`: for one technique, which need not be allowed.
        """
        key = id(original), only, frozenset((*self._dropped, *self._last))
        if key not in self._planners:
            first = self._new_planner(original, only)
            pinned = () if only else pinned_choice(original, self._measured_pins, self._allowed)
            named = self._to_measure(only)
            several = Planners(
                first, list(self._variants(original, first, pinned, only)), forced=bool(pinned)
            )
            self._planners[key] = several if pinned or named else first
        return self._planners[key]

    def _to_measure(self, only: str) -> list[str]:
        """The techniques to try of which it is measured what they save."""
        wanted = [only] if only else [*self._allowed.semantic_of(semantic_names()), *self._last]
        return [one for one in measured_names() if one in wanted and one not in self._exclude]

    def _variants(
        self, original: Trial, first: Planner, pinned: Choice, only: str
    ) -> Iterator[Variant]:
        """The step as it was recorded with each of them applied."""
        allowed = EVERYTHING if only else self._allowed
        named = self._to_measure(only)
        wanted = [pinned] if pinned else choices(original, named, self._dropped, allowed)
        whole = original.peak_bytes - first.simulated_original
        plain = first.unchanged(Budget(original.peak_bytes))
        for one in recorded(original, wanted, partial(self._with, plain), self._note):
            planner = self._new_planner(one.trial, only, (*one.barred,))
            over = one.trial.peak_bytes - planner.simulated_original
            yield Variant(one.techniques, planner, over - whole)

    def _with(self, plain: Plan, choice: Choice) -> Trial:
        """The trial of the original with techniques that make another function, run once."""
        key = id(self.original), repr(choice)
        if key not in self._recorded:
            plan = msgspec.structs.replace(plain, techniques=choice)
            self._recorded[key] = self.run_planned(plan)
        return self._recorded[key]

    def _note(self, text: str) -> None:
        if text not in self.notes:
            self.notes.append(text)

    def _new_planner(self, original: Trial, only: str, barred: Collection[str] = ()) -> Planner:
        if original.profile is None:
            raise Unsupported(
                f"the script did only {len(original.steps)} steps, and the planner needs one after "
                f"{self._request.warmup} of warm-up. Let it run for more, or give --warmup 0."
            )
        path = self.workload.path if isinstance(self.workload, Script) else None
        used = (only, *helped_by(only)) if only else ()
        others = ({*names()} - {*used} if only else set()) | (_ALONE if original.ranks else set())
        allow = max((self._allowed.least, *(technique(one).equivalence for one in used)), key=_RANK)
        return Planner(
            without_places(original.profile, self._dropped),
            step_seconds=original.seconds,
            fingerprint=original.fingerprint,
            script_sha256=sha256_of(path) if path else "",
            exclude=(*self._exclude, *self._dropped, *others, *barred),
            allow=allow,
            host_bytes=self._request.host_memory,
            pins={
                what: one for what, one in self._pins.items() if only in ("", what) or what == KEEP
            },
        )

    def fit(self, limit: MemoryLimit) -> Fit:
        """Plan, apply, measure, correct; then verify. Raises `InfeasibleBudget` if nothing fits."""
        found = self.nearest(limit)
        if found.missed is not None:
            raise found.missed
        return found

    def nearest(self, limit: MemoryLimit) -> Fit:
        """As `fit`; where nothing fits, the plan with the smallest peak, verified, and `missed`."""
        original = self.observe_longest()
        whole = measured(original, limit.kind)
        budget = limit.budget(whole)
        planner = self.planner(original)
        self.notes += {planner.pinned.note()} - {"", *self.notes}
        if whole <= budget.bytes and not planner.forced:
            notes = (*self.notes, "the original fits the budget as it is")
            unchanged = self._unchanged(original, budget)
            return Fit(original, budget, unchanged, None, None, notes)
        return self._surviving(
            lambda: self._within(original, budget),
            lambda: self._missed(original, budget, MeasuredPlan.unchanged(whole)),
        )

    def _turns_to_shards(self, original: Trial) -> bool:
        """Whether there is `shard` to try yet, now that no other plan fits; it is tried from then on."""
        if self._last or self._measured_pins:
            return False
        if not may_shard(original, self._allowed, self._exclude):
            return False
        self._last = (SHARD,)
        self._note("no plan without shard fits the budget, so it was tried")
        return True

    def smallest(self) -> Fit:
        """The plan with the smallest peak that was found, measured and verified."""
        original = self.observe_longest()
        whole, unchanged = Budget(original.peak_bytes), MeasuredPlan.unchanged(0)
        return self._surviving(
            lambda: self._smallest(original),
            lambda: self._verified(original, whole, unchanged),
        )

    def _smallest(self, original: Trial) -> Fit:
        planner = self.planner(original)
        bias = original.peak_bytes - planner.simulated_original
        budget = Budget(original.peak_bytes, bias=bias)
        plan = planner.floor_plan(budget)
        planned = self.run_planned(plan)
        tried = MeasuredPlan(plan, planned, planned.peak_bytes)
        if tried.used <= (1 - LEAST_SAVING) * original.peak_bytes or planner.forced:
            return self._verified(original, budget, tried)
        unchanged = MeasuredPlan.unchanged(original.peak_bytes)
        return self._verified(original, budget, unchanged)._replace(notes=(NOTHING,))

    def verify(self, original: Trial, plan: Plan, planned: Trial | None = None) -> Certificate:
        """Run the planned, unless it was; compare."""
        with self._requested(plan) as request:
            if planned is None:
                planned = self._run(request, "planned")
            if asked_of(plan):
                return self._verify_asked(original, plan, planned, request)
            contest = Contest(self.workload, self.workload, self._request, request)
            return certify_ranks(contest, original, planned, self._progress)

    def _verify_asked(
        self, original: Trial, plan: Plan, planned: Trial, request: Request
    ) -> Certificate:
        """Against the original in which a person made the same replacement."""
        replaced = by_hand(self._request, plan)
        reference = self._run(replaced, "original, with the replacement made by hand")
        contest = Contest(self.workload, self.workload, replaced, request, limit_of(plan))
        found = certify_ranks(contest, reference, planned, self._progress)
        return as_asked(found, plan, original, planned)

    def run_planned(self, plan: Plan) -> Trial:
        """Run it planned. Raises `PlannedStepFailed`, which has the plan."""
        try:
            with self._requested(plan) as request:
                return self._run(request, "planned")
        except PlannedStepFailed as error:
            error.plan = plan
            if broken_in(error):
                error.exit_code = ApplyFailed.exit_code
            raise

    @contextmanager
    def _requested(self, plan: Plan) -> Iterator[Request]:
        """The request for a planned run."""
        if not self._terms.exports:
            yield msgspec.structs.replace(self._request, plan=plan)
            return
        with working_folder() as folder:
            path = folder / "planned.py"
            path.write_text(exported(plan, ""), encoding="utf-8")
            yield msgspec.structs.replace(self._request, plan=plan, exported=str(path))

    def _surviving(self, attempt: Callable[[], Fit], otherwise: Callable[[], Fit]) -> Fit:
        """What the attempt gives; where a planned step fails, without the places that made it fail."""
        for number in range(_ROUNDS + 1):
            try:
                found = attempt()
                return found._replace(notes=(*self.notes, *found.notes))
            except PlannedStepFailed as error:
                if error.plan is None:
                    raise
                bad = broken_technique(error)
                if not bad:
                    bad = self._failing(error, error.plan, last=number == _ROUNDS - 1)
                else:
                    self._check_pinned(error, bad)
                self._dropped |= bad
                self.notes.append(failure_note(error, bad))
        return otherwise()._replace(notes=(*self.notes, "every plan that was tried failed"))

    def _failing(self, error: PlannedStepFailed, plan: Plan, *, last: bool) -> set[str]:
        """What to plan without, so that the step does not fail."""
        places = failing_places(error, plan, self.run_planned)
        self._check_pinned(error, places)
        profile = self.original.profile if self.original is not None else None
        return of_techniques(error, places, plan, profile, last=last)

    def _check_pinned(self, error: PlannedStepFailed, bad: Collection[str]) -> None:
        """Raises it where what fails is pinned."""
        assert self.original is not None
        forced = self.planner(self.original).pinned.forced
        pinned = sorted(where for what, where in forced if {what, where} & set(bad))
        if pinned:
            said = f"`{pinned[0]}` is pinned under [pins], and fails there. Take it out. It says: {error}"
            failed = PlannedStepFailed(
                said, place=pinned[0], learnt=error.learnt, traceback=error.traceback
            )
            failed.exit_code = error.exit_code
            raise failed from error

    def _within(self, original: Trial, budget: Budget) -> Fit:
        """A plan whose measured figure is within the budget, or the one that needs least."""
        planner = self.planner(original)
        whole = measured(original, budget.kind)
        first = bias = whole - planner.simulated_original
        tried = [] if planner.forced else [MeasuredPlan.unchanged(whole)]
        outcomes: list[PlanOutcome] = []
        notes: list[str] = []
        for number in range(_ROUNDS + 1):
            try:
                plan = planner.plan(budget.biased(bias)) if number < _ROUNDS else None
            except InfeasibleBudget:
                plan = None
            if plan is None and any(one.used <= budget.bytes for one in tried):
                break
            last = plan is None
            plan = plan or planner.floor_plan(budget.biased(bias))
            trial = self.run_planned(plan)
            used = measured(trial, budget.kind)
            tried.append(MeasuredPlan(plan, trial, used))
            outcomes.append(PlanOutcome(plan, used, plan.predicted.peak_bytes - bias + first))
            self._known[key_of(plan, budget.kind)] = used
            error = used - plan.predicted.peak_bytes
            if last or well_used(used, error, budget.bytes):
                break
            if used > budget.bytes:
                notes.append(
                    f"a plan predicted {format_bytes(plan.predicted.peak_bytes)} and measured "
                    f"{format_bytes(used)}; planned again"
                )
            bias += error
        if not planner.forced and all(one.used > budget.bytes for one in tried):
            tried += self._reconsidered(original, outcomes, budget.biased(first))
        fitting = [one for one in tried if one.used <= budget.bytes]
        if fitting:
            best = max(fitting, key=lambda one: one.used)
            if self._terms.candidates > 1:
                best = self._quickest(original, best, tried, budget.biased(bias))
            found = self._verified(original, budget, best)
        elif self._turns_to_shards(original):
            return self._within(original, budget)
        else:
            found = self._missed(original, budget, min(tried, key=lambda one: one.used))
        return found._replace(notes=(*notes, *found.notes))

    def _reconsidered(
        self, original: Trial, outcomes: list[PlanOutcome], budget: Budget
    ) -> Iterator[MeasuredPlan]:
        """Run what is predicted to need less than all that was run, until a plan fits the budget."""
        blamed = suspects(outcomes)
        if blamed:
            self._note(note_on(blamed))
        without = (self._planner_without(original, left) for left in blamed)
        predicted = sorted({*names()} - {*self._exclude, *measured_names()})
        alone = (self.planner(original, only=name) for name in predicted)
        for plan in plans_below((*without, *alone), budget, self._allowed):
            lowest = min((one.used for one in outcomes), default=measured(original, budget.kind))
            known = repr(plan.techniques) in {repr(one.plan.techniques) for one in outcomes}
            if lowest <= budget.bytes or known:
                continue
            if plan.predicted.peak_bytes >= (1 - LEAST_SAVING) * lowest:
                continue
            with suppress(PlannedStepFailed):
                trial = self.run_planned(plan)
                used = measured(trial, budget.kind)
                outcomes.append(PlanOutcome(plan, used, plan.predicted.peak_bytes))
                self._known[key_of(plan, budget.kind)] = used
                yield MeasuredPlan(plan, trial, used)

    def _planner_without(self, original: Trial, left: Collection[str]) -> Planner | Planners:
        """As `planner`, without these techniques."""
        before, self._dropped = self._dropped, {*self._dropped, *left}
        try:
            return self.planner(original)
        finally:
            self._dropped = before

    def _quickest(
        self, original: Trial, first: MeasuredPlan, tried: Sequence[MeasuredPlan], budget: Budget
    ) -> MeasuredPlan:
        """The quickest of the first and other plans, by the clock. What was tried is not run again."""
        if first.plan is None or first.trial is None:
            return first
        known = {repr(one.plan.techniques): one.trial for one in tried if one.plan is not None}

        def run(plan: Plan) -> Trial | None:
            trial = known.get(repr(plan.techniques)) or self.run_planned(plan)
            return trial if measured(trial, budget.kind) <= budget.bytes else None

        planner_of = partial(self.planner, original)
        missed = [one.plan for one in tried if one.plan is not None and one.used > budget.bytes]
        plans = others(planner_of, [first.plan, *missed], budget, self._terms.candidates - 1)
        best, note = quickest(TimedPlan(first.plan, first.trial), plans, run)
        self._note(note)
        return MeasuredPlan(best.plan, best.trial, measured(best.trial, budget.kind))

    def _verified(self, original: Trial, budget: Budget, tried: MeasuredPlan) -> Fit:
        if tried.plan is None or tried.trial is None:
            plan = self._unchanged(original, budget._replace(kind="allocated"))
            return Fit(original, budget, plan, None, None, ())
        certificate = self.verify(original, tried.plan, tried.trial)
        return Fit(original, budget, tried.plan, tried.trial, certificate, ())

    def _missed(self, original: Trial, budget: Budget, tried: MeasuredPlan) -> Fit:
        """The plan that needs least, and the error that says so and has it."""
        whole = measured(original, budget.kind)
        if tried.used > (1 - LEAST_SAVING) * whole and not self.planner(original).forced:
            tried = MeasuredPlan.unchanged(whole)
        found = self._verified(original, budget, tried)
        seconds = found.planned.seconds if found.planned is not None else original.seconds
        levers = levers_of(
            lambda name: self.planner(original, only=name),
            Budget(whole, budget.kind),
            Reached(found.plan.techniques, tried.used, seconds),
            self._exclude,
            self._allowed,
            lambda plan: self._known.get(key_of(plan, budget.kind)),
        )
        levers = with_shard(levers, self.workload, original, whole)
        missed = self.planner(original).infeasible(budget.bytes, tried.used)
        if not found.plan.techniques:
            missed = nothing_helps(budget.bytes, tried.used, missed.set_by)
        missed.plan, missed.certificate, missed.levers = found.plan, found.certificate, levers
        notes = (*found.notes, *refusals(original, self._exclude))
        return found._replace(missed=missed, levers=levers, notes=notes)

    def _unchanged(self, original: Trial, budget: Budget) -> Plan:
        """The plan that changes nothing."""
        planner = self.planner(original)
        bias = measured(original, budget.kind) - planner.simulated_original
        return planner.unchanged(budget.biased(bias))

    def _run(self, request: Request, what: str) -> Trial:
        with working_folder() as folder:
            return run_trial(
                self.workload, request, folder, lambda text: self._progress(f"{what}: {text}")
            )


_DIFFERS = 1.02
"""Peaks of steps that are alike differ by less: by what a logger keeps, or an allocator rounds."""


def longest_step(trial: Trial) -> int | None:
    """The step with the highest peak, where that is not the recorded one and clearly higher."""
    peaks = _peaks(trial)
    if trial.recorded not in peaks:
        return None
    longest = max(peaks, key=peaks.__getitem__)
    return longest if peaks[longest] > _DIFFERS * peaks[trial.recorded] else None


def recording(request: Request, step: int) -> Request:
    """The request that records that step; as many are run, and one to be timed at least."""
    return replace(request, warmup=step, steps=max(request.total - step - 1, 1))


def uneven_note(trial: Trial) -> str:
    """The note about it."""
    peaks = [peak for peak in _peaks(trial).values() if peak]
    return (
        f"the steps differ in length: peaks from {format_bytes(min(peaks))} to "
        f"{format_bytes(max(peaks))} in {len(peaks)} steps. Planned for the longest seen; the budget is on "
        "the highest of all, and a longer one may still come"
    )


def _peaks(trial: Trial) -> dict[int, int]:
    """Peaks of the measured steps, by number."""
    first = trial.request.warmup
    return {first + n: step.peak_bytes for n, step in enumerate(trial.steps[first:])}


def with_overheads(trial: Trial) -> Trial:
    """The trial with what running again takes besides on this machine, where that is what takes the time."""
    if trial.profile is None or not trial.profile.device.startswith("cpu"):
        return trial
    profile = replace(trial.profile, overheads=overheads())
    return replace(trial, profile=profile)
