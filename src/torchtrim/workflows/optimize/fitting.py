"""The whole loop: run, plan for a budget, run planned, correct the plan by the measurement, verify."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import NamedTuple

from msgspec.structs import replace

from torchtrim.certify.contest import Contest
from torchtrim.certify.variants import as_asked, asked_of, by_hand, certify_ranks, limit_of
from torchtrim.core.units import counted, format_apart, format_bytes
from torchtrim.core.words import first_line
from torchtrim.errors import ApplyFailed, InfeasibleBudget, PlannedStepFailed, Unsupported
from torchtrim.executor.apply import digest_of
from torchtrim.executor.export import exported
from torchtrim.executor.registry import exportable, names, technique
from torchtrim.planner.planner import Planner
from torchtrim.planner.plans import adding_up
from torchtrim.planner.variants import Planners, Variant
from torchtrim.records.budget import Budget, MemoryKind, MemoryLimit
from torchtrim.records.certificate import Certificate, with_proof
from torchtrim.records.figures import Lever
from torchtrim.records.finding import EQUIVALENCES, Equivalence
from torchtrim.records.plan import Plan
from torchtrim.records.terms import BITWISE, EVERYTHING, Terms, allowance
from torchtrim.records.trial import Request, Trial
from torchtrim.runner.script import Script, working_folder
from torchtrim.runner.trials import Progress, Workload, run_once
from torchtrim.workflows.optimize import trials
from torchtrim.workflows.optimize.levers import (
    LEAST_SAVING,
    SHARD,
    FoundPlan,
    levers_of,
    may_shard,
    out_of_reach,
    reached,
    refusals,
    rounded,
    with_shard,
)
from torchtrim.workflows.optimize.trials import (
    NOTHING,
    Choice,
    MeasuredPlan,
    PlanOutcome,
    TimedPlan,
)

_ROUNDS = 3  # corrections by measurement: the second mostly fits, and each one costs a run
_MOST_FAILED = 2 * _ROUNDS  # plans: each of the later half leaves out a technique that refuses
_MOST_RECONSIDERED = 4  # arbitrary; each costs a run, and plans predicted to fit come first
_LEVER_STEPS = 1  # timed ones: a lever's figures are not compared with the original's values
_DIFFERS = 1.02  # peaks of like steps differ by less: a logger's values, an allocator's rounding
_AS_PREDICTED = 1.005  # twice as far off as first plans are at worst: docs/measured.md
_MOST_LONGER = 2  # recordings of a longer step: each costs a run, and shows a later step
_LENGTHS = "the steps differ in length"
_TIMES = 2  # steps with operator times, whose median discards a single slow operator
_ALONE = {"micro_batch", "optimizer_in_backward"}
"""Not for a job of several ranks, which exchange gradients once, when backward has computed them."""
_RANK = EQUIVALENCES.index


class Fit(NamedTuple):
    """Result of fitting a workload. `planned` and `certificate` are None if the plan changes nothing.

    `missed`: the error of a budget that no plan meets; the plan then has the smallest peak, and `levers` are
    the peaks each technique would reach.
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
    """Fitting of one workload by plans within the terms. Every method runs and restores the workload.

    The original runs once for all budgets, and once more to record its longest step if steps differ.
    """

    def __init__(
        self, workload: Workload, request: Request, progress: Progress, terms: Terms = BITWISE
    ) -> None:
        self.workload = workload
        self._terms = terms
        self._allowed = allowance(terms.allow)
        trials.check_named(self._allowed)
        self._pins, self._measured_pins = trials.split_pins(terms.pins)
        unwritable = {*names()} - {*exportable(), *self._pins} if terms.exports else set()
        self._exclude = (*terms.exclude, *sorted(unwritable))
        self._request = request
        self._progress = progress
        self.original: Trial | None = None
        self._longer_runs = 0
        self._dropped: set[str] = set()
        self._last: tuple[str, ...] = ()
        self._planners: dict[tuple[int, str, frozenset[str]], Planner | Planners] = {}
        self._recorded: dict[tuple[int, str, int], Trial] = {}
        self._known: dict[tuple[str, MemoryKind], int] = {}
        self._tried: list[MeasuredPlan] = []
        self.notes: list[str] = []

    @contextmanager
    def interruptible(self) -> Iterator[None]:
        """Add what is known so far to a `KeyboardInterrupt`, as notes."""
        try:
            yield
        except KeyboardInterrupt as stop:
            for fact in trials.known_so_far(self.original, self._tried):
                stop.add_note(fact)
            raise

    def observe(self) -> Trial:
        """Return the original's trial."""
        if self.original is None:
            request = replace(self._request, times=_TIMES)
            self.original = trials.with_overheads(self._run(request, "original"))
        return self.original

    def observe_longest(self) -> Trial:
        """Return the original's trial with the recording of its step with the highest peak."""
        original = self.observe()
        while self._longer_runs < _MOST_LONGER:
            first = original.request.warmup
            peaks = {first + n: step.peak_bytes for n, step in enumerate(original.steps[first:])}
            longest = max(peaks, key=peaks.__getitem__, default=-1)
            if peaks.get(longest, 0) <= _DIFFERS * peaks.get(original.recorded, math.inf):
                break
            self._longer_runs += 1
            self._say_lengths(peaks)
            later = max(self._request.total - longest - 1, 1)  # one has to be timed at least
            self._request = replace(self._request, warmup=longest, steps=later)
            trial = self._run(self._request, "original, its longest step")
            self.original = original = trials.with_overheads(trial)
        return original

    def _say_lengths(self, peaks: dict[int, int]) -> None:
        """Note that steps differ, in place of an earlier note about fewer of them."""
        known = [format_bytes(peak) for peak in sorted(peaks.values()) if peak]
        self.notes = [note for note in self.notes if not note.startswith(_LENGTHS)]
        self.notes.append(
            f"{_LENGTHS}: peaks from {known[0]} to {known[-1]} in {len(known)} steps. "
            "Planned for the longest seen; the budget applies to the highest of all, and a "
            "longer step may still come"
        )

    def planner(self, original: Trial, only: str = "") -> Planner | Planners:
        """Return a planner for the observed step, without the dropped places.

        `only`: plan with this technique alone, even if the terms exclude it.
        """
        key = id(original), only, frozenset((*self._dropped, *self._last))
        if key not in self._planners:
            first = self._new_planner(original, only)
            pinned = (
                () if only else trials.pinned_choice(original, self._measured_pins, self._allowed)
            )
            named = self._to_measure(only)
            several = Planners(
                first, list(self._variants(original, first, pinned, only)), forced=bool(pinned)
            )
            self._planners[key] = several if pinned or named else first
        return self._planners[key]

    def _to_measure(self, only: str) -> list[str]:
        """Return the techniques to try whose saving is measured, not simulated."""
        wanted = (
            [only] if only else [*self._allowed.semantic_of(trials.semantic_names()), *self._last]
        )
        return [
            name for name in trials.measured_names() if name in wanted and name not in self._exclude
        ]

    def _variants(
        self, original: Trial, first: Planner, pinned: Choice, only: str
    ) -> Iterator[Variant]:
        """Yield a planner of the step recorded with each of these techniques applied."""
        allowed = EVERYTHING if only else self._allowed
        named = self._to_measure(only)
        barred = self._dropped | trials.barred(original, self._terms.pins)
        wanted = [pinned] if pinned else trials.choices(original, named, barred, allowed)
        whole = original.peak_bytes - first.simulated_original
        plain = first.unchanged(Budget(original.peak_bytes))
        run = partial(self._with, plain, lever=bool(only))
        for one in trials.recorded(original, wanted, run, self._note):
            planner = self._new_planner(one.trial, only, (*one.barred,))
            over = one.trial.peak_bytes - planner.simulated_original
            yield Variant(one.techniques, planner, over - whole)

    def _with(self, plain: Plan, choice: Choice, *, lever: bool) -> Trial:
        """Return the trial of the techniques alone; a lever's runs fewer steps."""
        if (known := self._recorded_with(choice)) is not None:
            return known
        steps = min(_LEVER_STEPS if lever else self._request.steps, self._request.steps)
        key = id(self.original), repr(choice), steps
        if key not in self._recorded:
            what = f"trying {' and '.join(dict.fromkeys(one.name for one in choice))}"
            self._recorded[key] = self.run_planned(replace(plain, techniques=choice), steps, what)
        return self._recorded[key]

    def _recorded_with(self, choice: Choice) -> Trial | None:
        return self._recorded.get((id(self.original), repr(choice), self._request.steps))

    def _note(self, text: str) -> None:
        if text not in self.notes:
            self.notes.append(text)

    def _new_planner(
        self,
        original: Trial,
        only: str,
        barred: Collection[str] = (),
        least: Equivalence = "BITWISE",
    ) -> Planner:
        if original.profile is None:
            raise Unsupported(
                f"the script ran only {len(original.steps)} steps, and the planner needs one after "
                f"{self._request.warmup} of warm-up. Let it run longer, or give --warmup 0."
            )
        path = self.workload.path if isinstance(self.workload, Script) else None
        used = (only, *trials.helped_by(only)) if only else ()
        others = ({*names()} - {*used} if only else set()) | (_ALONE if original.ranks else set())
        needed = (technique(one).equivalence for one in used)
        allow = max((self._allowed.least, least, *needed), key=_RANK)
        return Planner(
            trials.without_places(original.profile, self._dropped),
            step_seconds=original.seconds,
            fingerprint=original.fingerprint,
            script_sha256=digest_of(path) if path else "",
            exclude=(*self._exclude, *self._dropped, *others, *barred),
            allow=allow,
            host_bytes=self._request.host_memory,
            pins=trials.pins_for(only, self._pins),
        )

    def fit(self, limit: MemoryLimit) -> Fit:
        """Plan, apply, measure, correct; then verify. Raises `InfeasibleBudget` if no plan fits."""
        fit = self.nearest(limit)
        if fit.missed is not None:
            raise fit.missed
        return fit

    def nearest(self, limit: MemoryLimit) -> Fit:
        """Fit, or return the verified plan with the smallest peak, and `missed`."""
        with self.interruptible():
            return self._nearest(limit)

    def _nearest(self, limit: MemoryLimit) -> Fit:
        original = self.observe_longest()
        whole = trials.measured(original, limit.kind)
        budget = limit.budget(whole)
        planner = self.planner(original)
        self.notes += {planner.pinned.note()} - {"", *self.notes}
        if whole <= budget.bytes and not planner.forced:
            notes = (*self.notes, "the original fits the budget unchanged")
            unchanged = self._unchanged(original, budget)
            return Fit(original, budget, unchanged, None, None, notes)
        return self._surviving(
            lambda: self._within(original, budget),
            lambda: self._missed(original, budget, MeasuredPlan(None, None, whole)),
        )

    def _turns_to_shards(self, original: Trial) -> bool:
        """Allow `shard` from now on, since no other plan fits; return False if it cannot be tried."""
        tried = self._last or self._measured_pins
        if tried or not may_shard(original, self._allowed, self._exclude):
            return False
        self._last = (SHARD,)
        self._note("no plan without shard fits the budget, so it was tried")
        return True

    def smallest(self) -> Fit:
        """Return the plan with the smallest peak found, measured and verified."""
        original = self.observe_longest()
        whole, unchanged = Budget(original.peak_bytes), MeasuredPlan(None, None, 0)
        return self._surviving(
            lambda: self._smallest(original),
            lambda: self._verified(original, whole, unchanged),
        )

    def _smallest(self, original: Trial) -> Fit:
        planner = self.planner(original)
        bias = original.peak_bytes - planner.simulated_original
        budget = Budget(original.peak_bytes, bias=bias)
        self._progress("planning: for the smallest peak")
        plan = planner.floor_plan(budget)
        planned = self.run_planned(plan)
        tried = MeasuredPlan(plan, planned, planned.peak_bytes)
        if tried.used <= (1 - LEAST_SAVING) * original.peak_bytes or planner.forced:
            return self._verified(original, budget, tried)
        unchanged = MeasuredPlan(None, None, original.peak_bytes)
        return self._verified(original, budget, unchanged)._replace(notes=(NOTHING,))

    def verify(self, original: Trial, plan: Plan, planned: Trial | None = None) -> Certificate:
        """Compare the planned run, made here if not given, with the original."""
        with self._requested(plan) as request:
            if planned is None:
                planned = self._run(request, "planned")
            if not asked_of(plan):
                contest = Contest(self.workload, self.workload, self._request, request)
                return certify_ranks(contest, original, planned, self._progress)
            replaced = by_hand(self._request, plan)
            reference = self._run(replaced, "original, with the replacement made by hand")
            contest = Contest(self.workload, self.workload, replaced, request, limit_of(plan))
            certificate = certify_ranks(contest, reference, planned, self._progress)
            return as_asked(certificate, plan, original, planned)

    def run_planned(self, plan: Plan, steps: int | None = None, what: str = "planned") -> Trial:
        """Run the planned workload, with `steps` timed steps if given. Raises `PlannedStepFailed`."""
        try:
            with self._requested(plan) as request:
                if steps is not None:
                    request = replace(request, steps=steps)
                return self._run(request, what)
        except PlannedStepFailed as error:
            error.plan = plan
            if trials.broken_in(error):
                error.exit_code = ApplyFailed.exit_code
            raise

    @contextmanager
    def _requested(self, plan: Plan) -> Iterator[Request]:
        if not self._terms.exports:
            yield replace(self._request, plan=plan)
            return
        with working_folder() as folder:
            path = folder / "planned.py"
            path.write_text(exported(plan, ""), encoding="utf-8")
            yield replace(self._request, plan=plan, exported=str(path))

    def _surviving(self, attempt: Callable[[], Fit], otherwise: Callable[[], Fit]) -> Fit:
        """Return the fit of an attempt, repeated without the places that make its planned steps fail."""
        for number in range(_MOST_FAILED + 1):
            try:
                fit = attempt()
                return fit._replace(notes=(*self.notes, *fit.notes))
            except PlannedStepFailed as error:
                if error.plan is None:
                    raise
                bad = self._failing(error, error.plan, last=number >= _ROUNDS - 1)
                self._dropped |= bad
                self.notes.append(
                    "a planned step failed, which the original does not, and was planned again without "
                    f"{', '.join(sorted(bad))}: {first_line(error)}"
                )
        return otherwise()._replace(notes=(*self.notes, "every plan that was tried failed"))

    def _failing(self, error: PlannedStepFailed, plan: Plan, *, last: bool) -> set[str]:
        """Return the techniques and places without which a plan that failed is made again."""
        broken = trials.broken_technique(error)
        bad = broken or trials.failing_places(error, plan, self.run_planned)
        self._check_pinned(error, bad)
        profile = self.original.profile if self.original is not None else None
        return broken or trials.of_techniques(error, bad, plan, profile, last=last)

    def _check_pinned(self, error: PlannedStepFailed, bad: Collection[str]) -> None:
        """Raise the error again if a failing technique or place is pinned."""
        assert self.original is not None
        forced = self.planner(self.original).pinned.forced
        pinned = sorted(where for what, where in forced if {what, where} & set(bad))
        if pinned:
            said = f"`{pinned[0]}` is pinned under [pins], but fails there. Remove the pin. {error}"
            failed = PlannedStepFailed(
                said, place=pinned[0], learnt=error.learnt, traceback=error.traceback
            )
            failed.exit_code = error.exit_code
            raise failed from error

    def _within(self, original: Trial, budget: Budget) -> Fit:
        planner = self.planner(original)
        whole = trials.measured(original, budget.kind)
        first = bias = whole - planner.simulated_original
        tried = [] if planner.forced else [MeasuredPlan(None, None, whole)]
        outcomes: list[PlanOutcome] = []
        notes: list[str] = []
        if hopeless := out_of_reach(original, budget):
            self._note(hopeless)
        rounds = 0 if hopeless else _ROUNDS
        for number in range(rounds + 1):
            if not hopeless:
                self._progress(f"planning: for {format_bytes(budget.bytes)}")
            try:
                plan = planner.plan(budget.biased(bias)) if number < rounds else None
            except InfeasibleBudget:
                plan = None
            if plan is None and any(one.used <= budget.bytes for one in tried):
                break
            last = plan is None
            if plan is None:
                why = hopeless or f"no plan for {format_bytes(budget.bytes)} is known"
                self._progress(f"planning: {why}; {self._trials_to_come(original)}")
                plan = planner.floor_plan(budget.biased(bias))
            tried.append(self._measured(plan, budget.kind))
            used = tried[-1].used
            outcomes.append(PlanOutcome(plan, used, plan.predicted.peak_bytes - bias + first))
            error = used - plan.predicted.peak_bytes
            if last or trials.well_used(used, error, budget.bytes):
                break
            if used > budget.bytes:
                predicted, measured = format_apart(plan.predicted.peak_bytes, used)
                notes.append(f"a plan predicted {predicted} and measured {measured}; planned again")
            bias += error
        if not planner.forced and all(one.used > budget.bytes for one in tried):
            tried += self._reconsidered(original, outcomes, budget.biased(first))
        fitting = [one for one in tried if one.used <= budget.bytes]
        if fitting:
            best = max(fitting, key=lambda one: one.used)
            if self._terms.candidates > 1:
                best = self._quickest(original, best, tried, budget.biased(bias))
            fit = self._verified(original, budget, best)
        elif self._turns_to_shards(original):
            return self._within(original, budget)
        else:
            fit = self._missed(original, budget, min(tried, key=lambda one: one.used))
        return fit._replace(plan=adding_up(fit.plan, whole), notes=(*notes, *fit.notes))

    def _trials_to_come(self, original: Trial) -> str:
        """Return how many runs with one technique each a missed budget is followed by, in words."""
        named = [name for name in trials.measured_names() if name not in self._exclude]
        left_out = self._dropped | trials.barred(original, self._terms.pins)
        count = len(trials.choices(original, named, left_out, EVERYTHING))
        return f"then {counted(count, 'technique')} alone"

    def _measured(self, plan: Plan, kind: MemoryKind) -> MeasuredPlan:
        # The same techniques in the same request have run for their recording.
        known = None if self._terms.exports else self._recorded_with(plan.techniques)
        trial = known or self.run_planned(plan)
        used = self._known[repr(plan.techniques), kind] = trials.measured(trial, kind)
        self._tried.append(MeasuredPlan(plan, trial, used))
        return self._tried[-1]

    def _reconsidered(
        self, original: Trial, outcomes: list[PlanOutcome], budget: Budget
    ) -> Iterator[MeasuredPlan]:
        """Run plans predicted to need less than all plans so far, until a plan fits the budget."""
        blamed = trials.suspects(outcomes)
        if blamed:
            named = " and ".join(sorted(frozenset().union(*blamed)))
            self._note(f"{named} saved less than predicted, so plans without were tried too")
        without = (self._planner_without(original, left) for left in blamed)
        self._progress("planning: what else may fit")
        exact = []
        if self._allowed.least != "BITWISE":
            rounding = [name for name in names() if technique(name).equivalence != "BITWISE"]
            exact.append(self._planner_without(original, rounding))
        predicted = sorted({*names()} - {*self._exclude, *trials.measured_names()})
        alone = (self.planner(original, only=name) for name in predicted)
        runs = 0
        # The exact plan first: those that round may all need more than predicted.
        first = trials.plans_below(exact, budget, self._allowed)
        for plan in first + trials.plans_below((*without, *alone), budget, self._allowed):
            lowest = min(
                (one.used for one in outcomes), default=trials.measured(original, budget.kind)
            )
            known = repr(plan.techniques) in {repr(one.plan.techniques) for one in outcomes}
            if lowest <= budget.bytes or known:
                continue
            if plan.predicted.peak_bytes >= (1 - LEAST_SAVING) * lowest:
                continue
            if runs == _MOST_RECONSIDERED:
                self._note(f"after {runs} more plans, others predicted to need less were not tried")
                return
            runs += 1
            with suppress(PlannedStepFailed):
                tried = self._measured(plan, budget.kind)
                outcomes.append(PlanOutcome(plan, tried.used, plan.predicted.peak_bytes))
                yield tried

    def _planner_without(self, original: Trial, left: Collection[str]) -> Planner | Planners:
        before, self._dropped = self._dropped, {*self._dropped, *left}
        try:
            return self.planner(original)
        finally:
            self._dropped = before

    def _quickest(
        self, original: Trial, first: MeasuredPlan, tried: Sequence[MeasuredPlan], budget: Budget
    ) -> MeasuredPlan:
        if first.plan is None or first.trial is None:
            return first
        known = {repr(one.plan.techniques): one.trial for one in tried if one.plan is not None}

        def run(plan: Plan) -> Trial | None:
            trial = known.get(repr(plan.techniques)) or self.run_planned(plan)
            return trial if trials.measured(trial, budget.kind) <= budget.bytes else None

        planner_of = partial(self.planner, original)
        missed = [one.plan for one in tried if one.plan is not None and one.used > budget.bytes]
        plans = trials.others(planner_of, [first.plan, *missed], budget, self._terms.candidates - 1)
        best, note = trials.quickest(TimedPlan(first.plan, first.trial), plans, run)
        self._note(note)
        return MeasuredPlan(best.plan, best.trial, trials.measured(best.trial, budget.kind))

    def _verified(self, original: Trial, budget: Budget, tried: MeasuredPlan) -> Fit:
        if tried.plan is None or tried.trial is None:
            plan = self._unchanged(original, budget._replace(kind="allocated"))
            return Fit(original, budget, plan, None, None, ())
        certificate = self.verify(original, tried.plan, tried.trial)
        args = self.workload.args if isinstance(self.workload, Script) else None
        plan = with_proof(tried.plan, certificate, args)
        notes = tuple(_of_later_steps(tried.trial))
        return Fit(original, budget, plan, tried.trial, certificate, notes)

    def _missed(self, original: Trial, budget: Budget, tried: MeasuredPlan) -> Fit:
        self._progress("planning: what each technique would save alone")
        whole = trials.measured(original, budget.kind)
        if tried.used > (1 - LEAST_SAVING) * whole and not self.planner(original).forced:
            tried = MeasuredPlan(None, None, whole)
        fit = self._verified(original, budget, tried)
        seconds = fit.planned.seconds if fit.planned is not None else original.seconds
        levers = levers_of(
            lambda name: self._found(lambda: self._floor(original, name, budget.kind), budget),
            whole,
            reached(fit.plan.techniques, tried.used, seconds),
            self._exclude,
            self._allowed,
        )
        if self._allowed.least == "BITWISE":
            self._progress("planning: techniques that round, together")
            found = partial(self._found, partial(self._rounding, original, budget), budget)
            levers += rounded(found, budget, levers, self._allowed)
        levers = with_shard(levers, self.workload, original, whole)
        missed = self.planner(original).infeasible(budget.bytes, tried.used)
        if not fit.plan.techniques:
            missed = trials.nothing_helps(budget.bytes, tried.used, missed.set_by)
        missed.plan, missed.certificate, missed.levers = fit.plan, fit.certificate, levers
        notes = (*fit.notes, *refusals(original, self._exclude))
        return fit._replace(missed=missed, levers=levers, notes=notes)

    def _floor(self, original: Trial, name: str, kind: MemoryKind) -> Plan:
        """Return the plan of one technique alone that needs least."""
        planner = self.planner(original, only=name)
        bias = trials.measured(original, kind) - planner.simulated_original
        return planner.floor_plan(Budget(0, kind, bias))

    def _rounding(self, original: Trial, budget: Budget) -> Plan:
        """Return the plan for a budget of all techniques, those that round too."""
        planner = self._new_planner(original, "", least="ROUNDING")
        bias = trials.measured(original, budget.kind) - planner.simulated_original
        return planner.plan(budget.biased(bias))

    def _found(self, make: Callable[[], Plan], budget: Budget) -> FoundPlan:
        """Return a plan, run where it is predicted to meet a budget, without the places that fail then.

        Some techniques find out only there that they may not be used. Raises `PlannedStepFailed` if they fail
        everywhere.
        """
        before = self._dropped
        try:
            number = 0
            while True:
                plan = make()
                known = self._known.get((repr(plan.techniques), budget.kind))
                if known is not None or plan.predicted.peak_bytes > budget.bytes:
                    return FoundPlan(plan, known)
                try:
                    trial = self._with(plan, plan.techniques, lever=True)
                    return FoundPlan(plan, trials.measured(trial, budget.kind), trial.seconds)
                except PlannedStepFailed as error:
                    if number == _MOST_FAILED:
                        raise
                    number += 1
                    last = number >= _ROUNDS
                    self._dropped = self._dropped | self._failing(error, plan, last=last)
        finally:
            self._dropped = before

    def _unchanged(self, original: Trial, budget: Budget) -> Plan:
        planner = self.planner(original)
        bias = trials.measured(original, budget.kind) - planner.simulated_original
        return planner.unchanged(budget.biased(bias))

    def _run(self, request: Request, what: str) -> Trial:
        return run_once(self.workload, request, what, self._progress)


def _of_later_steps(planned: Trial) -> Iterator[str]:
    """Yield a note if a later step needs more than the recorded one, for which alone a plan is predicted.

    So do steps of scripts that draw their depth: equally long ones differ in what a plan saves of them.
    """
    recorded = planned.profile.peak_bytes if planned.profile is not None else 0
    highest = planned.peak_bytes
    if recorded and highest > _AS_PREDICTED * recorded:
        least, most = format_apart(recorded, highest)
        count = len(planned.steps) - planned.request.warmup
        yield (
            f"the planned steps differ: peaks from {least} in the recorded one, which is predicted, to "
            f"{most} in {count} steps. The budget applies to the highest, and a higher one may still come"
        )
