"""Profile and budget -> plan. The one place that plans training steps.

Plans keep host memory, pinned or in files, within a separate budget.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import cached_property, partial
from importlib.util import find_spec
from typing import TYPE_CHECKING, NamedTuple

from torchtrim.analysis.held import locals_past_use
from torchtrim.analysis.prices import device_of
from torchtrim.core.units import format_apart, format_bytes
from torchtrim.errors import InfeasibleBudget, UsageError
from torchtrim.executor.registry import Option, edit_of, in_files_of, options_of, settled, units
from torchtrim.memory.packing.buffers import bytes_over_time
from torchtrim.planner.by_hand import by_hand
from torchtrim.planner.other_budgets import in_order, point_of
from torchtrim.planner.pins import Patterns, Pins, overlap
from torchtrim.planner.plans import build_plan, by_technique, equivalence_of, techniques_of
from torchtrim.planner.problem import (
    Answer,
    Chosen,
    Front,
    Point,
    Problem,
    Solution,
    least_seconds,
)
from torchtrim.planner.solvers.search import search, solve_exactly
from torchtrim.records.budget import Budget
from torchtrim.records.finding import EQUIVALENCES, Equivalence
from torchtrim.records.operator_names import word_of
from torchtrim.records.plan import Plan, PredictedEffect, Prediction
from torchtrim.records.profile import Place, Profile, is_emulated
from torchtrim.records.report import FrontierPoint
from torchtrim.step.edits import Block, Edit, host_blocks, host_peak, overwritten
from torchtrim.step.from_profile import on_device, step_of
from torchtrim.step.links import added_seconds, traffic
from torchtrim.step.simulate import Outcome, level, simulate
from torchtrim.step.step import Step

if TYPE_CHECKING:
    from torchtrim.planner.solvers.integer import Integer

_LEAST_SECONDS = 1e-9  # Options that add less count as free; far below the cost of one launch.
# Seconds to look for the quickest choice: for a plan, and for one point of a frontier.
_SEARCH, _GLANCE = 20.0, 2.5
_HOPELESS = 1.05
"""Of a budget: arbitrary. A smallest peak above it is within no reach of a longer search."""
# Arbitrary; a choice this close to its bound, as a share of the bound, is reported as optimal.
_OPTIMAL_SHARE = 1e-4
_WORTH_SAYING = 0.02  # Arbitrary share of the peak, as `analysis.held` has.


class Choice(NamedTuple):
    """Options, the step's outcome with them, and a lower bound on the seconds that any choice as low adds."""

    options: tuple[Option, ...]
    outcome: Outcome
    optimal: bool
    bound_seconds: float


class _Subproblem(NamedTuple):
    """A subset of a problem's options, by their numbers there, with the best choices from it."""

    numbers: list[int]
    problem: Problem
    front: Front

    def among_all(self, chosen: Chosen) -> Chosen:
        return tuple(self.numbers[number] for number in chosen)


class Planner:
    """Plans for one profile; `step_seconds` is the original's step without the recorder.

    Options that only overwrite their input cost nothing, and some options save time: every plan that changes
    anything uses all of these. For an emulated device, options are chosen by their cost on that device, but
    the predicted seconds are for this machine.

    `exclude`: techniques, places, or places of one technique (`recompute:Net.a`) not to use. `allow`: the
    loosest equivalence. `pins`: requirements on every plan (`planner.pins`). `host_bytes`: a limit on host
    memory. Raises `UsageError` for pins that match nothing or contradict each other.
    """

    def __init__(
        self,
        profile: Profile,
        *,
        step_seconds: float,
        fingerprint: Mapping[str, str],
        script_sha256: str = "",
        exclude: Collection[str] = (),
        allow: Equivalence = "BITWISE",
        pins: Patterns | None = None,
        host_bytes: int | None = None,
    ) -> None:
        self.profile = profile
        self._fingerprint = dict(fingerprint)
        self._sha256 = script_sha256
        self._exclude = frozenset(exclude)
        self._allow = allow
        self._host_bytes = host_bytes
        self._step = self._priced = step_of(profile, step_seconds)
        if is_emulated(profile.device):
            self._priced = on_device(self._step, device_of(profile))
        self._answers: dict[int, tuple[float, Answer]] = {}
        self._pins = pins or {}
        self.pinned = Pins(self._pins, self._priced, self._offered() if pins else ())
        self._original = Choice((), simulate(self._step), optimal=True, bound_seconds=0.0)

    @property
    def simulated_original(self) -> int:
        """The simulated peak of the original step, in bytes."""
        return self._original.outcome.peak_bytes

    @property
    def priced(self) -> tuple[float, float]:
        """Seconds of the step on the target device, and on this machine."""
        return self._priced.seconds, self._step.seconds

    @property
    def forced(self) -> bool:
        """True if a plan must change something even if the original fits."""
        return bool(self.pinned.forced)

    @cached_property
    def floor(self) -> Choice:
        """The choice with the smallest peak, possibly the original step."""
        if self._integer is not None:
            self._offer_from(self._exact, lambda one, front: one.lowest(front.lowest.chosen))
            self._offer(self._integer.lowest(self._solved.front.lowest.chosen))
        lowest = self._solved.front.lowest.peak_bytes
        if not self.pinned.forced:
            lowest = min(lowest, self.simulated_original)
        choice = self._within(lowest, _GLANCE)
        assert choice is not None
        return choice

    def unchanged(self, budget: Budget) -> Plan:
        """Return the plan that changes nothing."""
        return self._plan(self._original, budget)

    def plan(self, budget: Budget) -> Plan:
        """Return the quickest plan that is predicted to stay within the budget.

        Raises `InfeasibleBudget` with the smallest feasible peak and its source.
        """
        choice = None if self._is_hopeless(budget.simulated) else self._within(budget.simulated)
        if choice is None and self.floor.outcome.peak_bytes <= budget.simulated:
            choice = self.floor
        if choice is None:
            raise self.infeasible(budget.bytes, self.floor.outcome.peak_bytes + budget.bias)
        return self._plan(choice, budget)

    def floor_plan(self, budget: Budget) -> Plan:
        """Return the plan with the smallest peak found."""
        return self._plan(self.floor, budget)

    def infeasible(self, budget: int, smallest: int) -> InfeasibleBudget:
        """Return the error that states the smallest budget that fits and the source of the smallest peak."""
        set_by = self.set_by(self.floor)
        asked, needed = format_apart(budget, smallest)
        return InfeasibleBudget(
            f"no plan brings the peak to {asked}. The smallest found needs "
            f"{needed} ({smallest} bytes), set by {set_by}. "
            f"{self._cost_of_pins(smallest)}Use --memory {smallest} or more, or {self._else()}."
            f"{self._past_use()}",
            smallest_bytes=smallest,
            set_by=set_by,
        )

    def _else(self) -> str:
        """Return what a person could do about the smallest peak."""
        at, calls = self.floor.outcome.task, self.profile.calls
        without = [call for call in calls if call.first <= at < call.last and not call.graded]
        if not without or not any(call.graded for call in calls):
            return "a smaller batch"
        path = self.profile.modules[min(without, key=lambda call: call.depth).module].path
        return (
            f"call `{path}` on parts of the batch: it runs without gradients there, so nothing is kept for "
            "backward that a plan could free"
        )

    def _past_use(self) -> str:
        """Name the line whose result a local variable keeps at the smallest peak, past its last use."""
        at, storages, kept = self.floor.outcome.task, self.profile.storages, Counter[Place]()
        for place, deaths in locals_past_use(self.profile).items():
            past = (n for n, death in deaths.items() if death <= at < storages[n].death)
            kept[place] += sum(storages[n].counted for n in past)
        most = kept.most_common(1)
        if not most or most[0][1] < _WORTH_SAYING * self.floor.outcome.peak_bytes:
            return ""
        place, size = most[0]
        return (
            f" {format_bytes(size)} of it is the result of {place.path}:{place.line}, which a variable keeps "
            f"past its last use until `{place.function}` returns: `del` it there."
        )

    def _cost_of_pins(self, smallest: int) -> str:
        if not self._pins:
            return ""
        free = Planner(
            self.profile,
            step_seconds=self._step.seconds,
            fingerprint={},
            exclude=self._exclude,
            allow=self._allow,
            host_bytes=self._host_bytes,
        )
        without = free.floor.outcome.peak_bytes + smallest - self.floor.outcome.peak_bytes
        return f"Without [pins], {format_bytes(without)} would suffice. "

    def frontier(self, points: int = 8, *, bias: int = 0) -> tuple[FrontierPoint, ...]:
        """Return the best plans for budgets from the original's peak down to the floor, and manual plans.

        Each plan comes once, the largest budget first. The search covers all budgets before it picks plans,
        so a looser budget never gets a slower plan.
        """
        low, high = self.floor.outcome.peak_bytes, self.simulated_original
        if self.pinned.forced:
            high = self._problem.run(()).peak_bytes
        budgets = [high - (high - low) * step // points for step in range(points + 1)]
        for budget in budgets:
            self._within(budget, _GLANCE)
        points_found = []
        for budget in budgets:
            choice = self._within(budget, _GLANCE) or self.floor
            points_found.append(self._point(choice.outcome, choice.options, bias, budget))
        for way in by_hand(self._priced):
            outcome = simulate(self._priced, way.edits)
            if (peak := outcome.peak_bytes) < self.simulated_original:
                points_found.append(self._point(outcome, way.options, bias, peak, way.name))
        return in_order(points_found)

    def _point(
        self, outcome: Outcome, options: Iterable[Option], bias: int, budget: int, name: str = ""
    ) -> FrontierPoint:
        return point_of(
            self.profile,
            tuple(options),
            budget_bytes=budget + bias,
            peak_bytes=outcome.peak_bytes + bias,
            seconds=self._priced.seconds + outcome.added_seconds,
            by_hand=name,
        )

    def set_by(self, choice: Choice) -> str:
        """Return the operator during which memory is highest, or the inserted work before it, in words."""
        index = choice.outcome.task
        if index < 0:
            return "memory from before the step"
        op = self.profile.operators[index]
        what = self._inserted(choice) or word_of(op.name)
        parts = [f"{what} in the {op.phase}"]
        if module := self.profile.module_of(index):
            parts.append(f"of {module}")
        if place := self.profile.place_of(index):
            parts.append(f"({place.path}:{place.line})")
        return " ".join(parts)

    def _inserted(self, choice: Choice) -> str:
        """Return the inserted work just before the task of the peak, if that work sets the peak."""
        step, index = self._overwriting[0], choice.outcome.task
        most, work = step.tasks[index].transient, ""
        for option, edit in _with_edits(step, choice.options):
            for insert in edit.inserts:
                if insert.at == index and level(insert) > most:
                    most, work = level(insert), f"{option.technique} of {option.where}"
        return work

    @cached_property
    def _free(self) -> tuple[Option, ...]:
        """The options that cost nothing, since they only overwrite."""
        pairs = self._edits(self._priced)
        free = tuple(o for o, edit in pairs if edit.overwrites and self.pinned.may(o, edit))
        if not self.pinned.forced:
            return free
        left = [option for option, _ in self._edits(self._overwritten(self._priced, free))]
        if not self.pinned.missing((*free, *left)):
            return free
        return tuple(option for option in free if self.pinned.demands(option))

    @cached_property
    def _problem(self) -> Problem:
        """The options that cost time, in the step with all free overwrites."""
        step, pairs = self._overwriting
        forced = [edit for _, edit in self._forced]
        claimed = [span for edit in forced for span in edit.claims]
        costly = [
            (option, edit)
            for option, edit in pairs
            if edit.seconds > _LEAST_SECONDS
            and self.pinned.may(option, edit)
            and not overlap(edit.claims, claimed)
        ]
        return Problem(step, [o for o, _ in costly], [e for _, e in costly], forced)

    @cached_property
    def _overwriting(self) -> tuple[Step, list[tuple[Option, Edit]]]:
        """The step with all free overwrites, and the other options in it."""
        step = self._overwritten(self._priced, self._free)
        costly = [pair for pair in self._edits(step) if not pair[1].overwrites]
        if self._host_bytes is None:
            return step, costly
        admitted = within_host(step, costly, self._host_bytes)
        return step, [*admitted, *in_files(step, costly, admitted, self._allowed_names())]

    @cached_property
    def _forced(self) -> list[tuple[Option, Edit]]:
        """The pinned options and those that save time, without those that only overwrite."""
        forced = [
            (option, edit)
            for option, edit in self._overwriting[1]
            if self.pinned.demands(option) or (edit.seconds < 0 and self.pinned.may(option, edit))
        ]
        if missing := self.pinned.missing((*self._free, *(option for option, _ in forced))):
            raise UsageError(
                f"`{missing[0]}` is pinned under [pins], which conflicts with another pin that lets an "
                "activation overwrite its input. Remove one of them."
            )
        return forced

    def _overwritten(self, step: Step, free: Iterable[Option]) -> Step:
        return overwritten(step, (t for edit in _edits_of(step, free) for t in edit.overwrites))

    @cached_property
    def _solved(self) -> Solution:
        solution = solve_exactly(self._problem) or search(self._problem)
        if not solution.optimal:
            self._offer_alone(solution.front)
        return solution

    def _offer_alone(self, front: Front) -> None:
        """Add the choices from subsets of the options: more options must not make the best choice worse."""
        others = [number for number, edit in enumerate(self._problem.edits) if not edit.trips]
        for alone in filter(None, (self._offloads, self._alone(others), self._exact)):
            for point in alone.front.points:
                front.add(point._replace(chosen=alone.among_all(point.chosen)))

    @cached_property
    def _offloads(self) -> _Subproblem | None:
        return self._alone([n for n, edit in enumerate(self._problem.edits) if edit.trips])

    def _offer_from(
        self, alone: _Subproblem | None, ask: Callable[[Integer, Front], Answer]
    ) -> None:
        """Add what the integer program of a subset answers, which the search over all options may miss."""
        if alone and (integer := _integer_of(alone.problem)) is not None:
            answer = ask(integer, alone.front)
            if answer.chosen is not None:
                self._offer(answer._replace(chosen=alone.among_all(answer.chosen)))

    @cached_property
    def _exact(self) -> _Subproblem | None:
        options = enumerate(self._problem.options)
        return self._alone([n for n, option in options if equivalence_of(option) == "BITWISE"])

    def _alone(self, numbers: list[int]) -> _Subproblem | None:
        if not 0 < len(numbers) < len(self._problem.options):
            return None
        problem = self._problem.only(numbers)
        solution = solve_exactly(problem) or search(problem)
        return _Subproblem(numbers, problem, solution.front)

    def _edits(self, step: Step) -> list[tuple[Option, Edit]]:
        every = (option for name in self._allowed_names() for option in options_of(name, step))
        return _with_edits(step, filter(self._is_allowed, every))

    def _is_allowed(self, option: Option) -> bool:
        barred = {option.where, f"{option.technique}:{option.where}"} & self._exclude
        return not barred and _allowed(equivalence_of(option), self._allow)

    def _allowed_names(self) -> list[str]:
        known = units(self._exclude)
        return [name for name, unit in known.items() if _allowed(unit.equivalence, self._allow)]

    def _offered(self) -> list[tuple[Option, Edit]]:
        """Return the options of the step with and without free overwrites."""
        pairs = self._edits(self._priced)
        free = [option for option, edit in pairs if edit.overwrites]
        known = {(option.technique, option.where) for option, _ in pairs}
        more = self._edits(self._overwritten(self._priced, free))
        return [*pairs, *(pair for pair in more if (pair[0].technique, pair[0].where) not in known)]

    def _within(self, budget: int, seconds: float = _SEARCH) -> Choice | None:
        """Return the quickest choice whose simulated peak is within a budget, after a search of `seconds`."""
        if self.simulated_original <= budget and not self.pinned.forced:
            return self._original
        answer = self._proof(budget, seconds)
        point = self._solved.front.within(budget)
        if point is None:
            return None
        options = tuple(self._problem.options[number] for number in point.chosen)
        outcome = self._problem.run(point.chosen)
        proven = answer is not None and self._problem.is_additive
        bound = answer.bound if answer and proven else least_seconds(self._problem, budget)
        over = outcome.added_seconds - bound
        optimal = self._solved.optimal or over <= _OPTIMAL_SHARE * abs(bound)
        forced = (option for option, _ in self._forced)
        return Choice((*self._free, *forced, *options), outcome, optimal, bound)

    @cached_property
    def _integer(self) -> Integer | None:
        return None if self._solved.optimal else _integer_of(self._problem)

    def _is_hopeless(self, budget: int) -> bool:
        """Return True if no choice near a budget is known, which spares a search for one within it."""
        known = self.simulated_original <= budget and not self.pinned.forced
        if known or self._solved.front.within(budget) is not None:
            return False
        return self.floor.outcome.peak_bytes > _HOPELESS * budget

    def _proof(self, budget: int, seconds: float) -> Answer | None:
        """Return the integer program's answer for a budget, and add its choice to the front."""
        if self._integer is None:
            return None
        searched, answer = self._answers.get(budget, (0.0, None))
        if answer is None or (searched < seconds and not answer.proven):
            answer = _quickest(budget, seconds, self._integer, self._solved.front)
            self._offer(answer)
            self._offer_from(self._offloads, partial(_quickest, budget, min(seconds, _GLANCE)))
            self._answers[budget] = seconds, answer
        return answer

    def _offer(self, answer: Answer) -> None:
        if answer.chosen is not None:
            outcome = self._problem.run(answer.chosen)
            self._solved.front.add(Point(outcome.peak_bytes, outcome.added_seconds, answer.chosen))

    def _seconds(self, choice: Choice) -> tuple[float, float]:
        """Return the seconds of a step on this machine with a choice, and a lower bound on them."""
        added, bound = choice.outcome.added_seconds, choice.bound_seconds
        if self._priced is not self._step:
            step = self._overwritten(self._step, self._free)
            added, bound = added_seconds(step, _edits_of(step, choice.options)), 0.0
        return self._step.seconds + added, self._step.seconds + min(bound, added)

    def _effects(self, options: Iterable[Option]) -> Iterator[PredictedEffect]:
        """Predict the effect of each technique on top of those before it."""
        peak, seconds, taken = self.simulated_original, 0.0, list[Option]()
        for (name, _, _), group in by_technique(options).items():
            taken += group
            free = [option for option in taken if option in self._free]
            step = self._overwritten(self._priced, free)
            outcome = simulate(step, _edits_of(step, taken))
            added = outcome.added_seconds
            if self._priced is not self._step:
                own = self._overwritten(self._step, free)
                added = added_seconds(own, _edits_of(own, taken))
            yield PredictedEffect(
                technique=name,
                saved_bytes=peak - outcome.peak_bytes,
                added_seconds=added - seconds,
            )
            peak, seconds = outcome.peak_bytes, added

    def _plan(self, choice: Choice, budget: Budget) -> Plan:
        seconds, least = self._seconds(choice)
        step = self._overwriting[0] if choice.options else self._priced
        edits = _edits_of(step, choice.options)
        return build_plan(
            self.profile,
            fingerprint=self._fingerprint,
            script_sha256=self._sha256,
            budget_bytes=budget.bytes,
            asked=budget.asked,
            memory_kind=budget.kind,
            techniques=tuple(settled(step, one) for one in techniques_of(choice.options)),
            predicted=Prediction(
                peak_bytes=max(choice.outcome.peak_bytes + budget.bias, 0),
                step_seconds=seconds,
                host_bytes=host_peak(edits),
                stall_seconds=traffic(step, edits).stall,
                effects=tuple(self._effects(choice.options)),
            ),
            pins=self._pins,
            status="optimal" if choice.optimal else "feasible",
            bound_seconds=least,
        )


def _quickest(budget: int, seconds: float, integer: Integer, front: Front) -> Answer:
    """Return an integer program's quickest choice within a budget, from the best of a front."""
    known = front.within(budget)
    return integer.quickest(budget, known.chosen if known else None, seconds)


def _integer_of(problem: Problem) -> Integer | None:
    """Return a problem's integer program, or None if its solver is not installed or it is too large."""
    if find_spec("highspy") is None:
        return None
    from torchtrim.planner.solvers.integer import Integer

    integer = Integer(problem)
    return integer if integer.fits else None


def _allowed(equivalence: Equivalence, allow: Equivalence) -> bool:
    return EQUIVALENCES.index(equivalence) <= EQUIVALENCES.index(allow)


Pair = tuple[Option, Edit]


def _with_edits(step: Step, options: Iterable[Option]) -> list[Pair]:
    """Return the options that still save something in the step, with their edits."""
    pairs = ((option, edit_of(step, option)) for option in options)
    return [(option, edit) for option, edit in pairs if edit is not None]


def _edits_of(step: Step, options: Iterable[Option]) -> list[Edit]:
    return [edit for _, edit in _with_edits(step, options)]


def within_host(step: Step, pairs: Sequence[Pair], host_bytes: int) -> list[Pair]:
    """Return the options that fit into host memory together; options without host memory always do.

    Options that free the most bytes for the longest come first.
    """
    taken: list[Block] = []
    admitted: set[int] = set()
    order = sorted(range(len(pairs)), key=lambda number: -_area(pairs[number][1]))
    for number in order:
        blocks = host_blocks(pairs[number][1])
        lives = [(block.bytes, block.first, block.last) for block in (*taken, *blocks)]
        if max(bytes_over_time(len(step.tasks), lives), default=0) <= host_bytes:
            taken += blocks
            admitted.add(number)
    while host_peak(pairs[number][1] for number in admitted) > host_bytes:
        admitted.remove(min(admitted, key=lambda number: _area(pairs[number][1])))
    return [pair for number, pair in enumerate(pairs) if number in admitted or not _area(pair[1])]


def in_files(
    step: Step, pairs: Sequence[Pair], admitted: Sequence[Pair], names: Iterable[str]
) -> list[Pair]:
    """Return the options that techniques can keep in files, for those that host memory did not admit."""
    kept = {option.where for option, _ in admitted}
    on_host = {option.where for option, edit in pairs if host_blocks(edit)}
    every = (option for name in names for option in in_files_of(name, step))
    left = (o for o in every if o.where.removesuffix(" in file") not in kept & on_host)
    return _with_edits(step, left)


def _area(edit: Edit) -> int:
    return sum(block.bytes * (block.last - block.first) for block in host_blocks(edit))
