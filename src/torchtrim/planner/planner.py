"""Profile and budget -> plan. The one place that makes plans of a step."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from functools import cached_property
from typing import NamedTuple

from torchtrim.analysis.prices import device_of
from torchtrim.core.units import format_bytes
from torchtrim.errors import InfeasibleBudget, UsageError
from torchtrim.executor.registry import Option, edit_of, options_of, settled, units
from torchtrim.planner.bound import least_seconds
from torchtrim.planner.by_hand import by_hand
from torchtrim.planner.front import Front, Point
from torchtrim.planner.pins import Patterns, Pinned, overlap
from torchtrim.planner.plans import equivalence_of, made_plan, techniques_of
from torchtrim.planner.pools import in_files, within_host
from torchtrim.planner.problem import Chosen, Problem
from torchtrim.planner.solvers.base import Answer
from torchtrim.planner.solvers.exact import Exact
from torchtrim.planner.solvers.integer import Integer
from torchtrim.planner.solvers.local import Local
from torchtrim.records.budget import Budget
from torchtrim.records.finding import EQUIVALENCES, Equivalence
from torchtrim.records.plan import Plan, Prediction
from torchtrim.records.profile import Profile, is_emulated
from torchtrim.records.report import FrontierPoint
from torchtrim.step.costs import on_device
from torchtrim.step.edits import Edit
from torchtrim.step.from_profile import step_of
from torchtrim.step.host import host_peak
from torchtrim.step.links import added_seconds, traffic
from torchtrim.step.overwrite import overwritten
from torchtrim.step.simulate import Outcome, level, simulate
from torchtrim.step.step import Step

_SOLVERS = (Exact(), Local())
_LEAST_SECONDS = 1e-9
_SEARCH, _GLANCE = 20.0, 2.5
"""Seconds for which the quickest choice is looked for: for a plan, and for one of many points."""
_ALIKE = 1e-4


class Choice(NamedTuple):
    """Options, what the step is with them, and how sure it is that no others are quicker.

    `bound_seconds`: what any choice that is as low adds at least.
    """

    options: tuple[Option, ...]
    outcome: Outcome
    optimal: bool
    bound_seconds: float


class _Alone(NamedTuple):
    """Some of the options, by their numbers among all, and the best choices of them."""

    numbers: list[int]
    problem: Problem
    front: Front

    def among_all(self, chosen: Chosen) -> Chosen:
        """A choice of them by the numbers among all."""
        return tuple(self.numbers[number] for number in chosen)


class Planner:
    """Plans for one profile; `step_seconds` is the original's step without the recorder.

    What overwrites its input costs nothing, and some options save time: whatever may does, in every plan that
    changes something.
    For an emulated device the options are chosen by what they cost there; predicted are the seconds here.
    `exclude` names techniques, places, or places of one technique (`recompute:Net.a`), that are not to be
    used; `allow` is the least equal result. `pins`: what holds in every plan (`planner.pins`).
    `host_bytes`: what plans may take of the host's memory, None for no limit. Raises `UsageError` for
    pins that match nothing or contradict each other.
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
        self._step = step_of(profile, step_seconds)
        self._priced = _priced(self._step)
        self._answers: dict[int, tuple[float, Answer]] = {}
        self._pins = pins or {}
        self.pinned = Pinned(self._pins, self._priced, self._offered() if pins else ())
        self._original = Choice((), simulate(self._step), optimal=True, bound_seconds=0.0)

    @property
    def simulated_original(self) -> int:
        """The simulated peak of the step as it is, in bytes."""
        return self._original.outcome.peak_bytes

    @property
    def priced(self) -> tuple[float, float]:
        """Seconds of the step on the device that it is for, and here."""
        return self._priced.seconds, self._step.seconds

    @property
    def forced(self) -> bool:
        """Whether a plan has to change something, though the original fits."""
        return bool(self.pinned.forced)

    @cached_property
    def floor(self) -> Choice:
        """The choice with the smallest peak; the step as it is where none is smaller."""
        if self._integer is not None:
            self._offer_lowest_of_exact()
            self._offer(self._integer.lowest(self._front.lowest.chosen))
        lowest = self._front.lowest.peak_bytes
        if not self.pinned.forced:
            lowest = min(lowest, self.simulated_original)
        choice = self._within(lowest, _GLANCE)
        assert choice is not None
        return choice

    def unchanged(self, budget: Budget) -> Plan:
        """The plan that changes nothing."""
        return self._plan(self._original, budget)

    def plan(self, budget: Budget) -> Plan:
        """The quickest plan that is expected to stay within the budget.

        Raises `InfeasibleBudget` with the smallest feasible peak and what sets it.
        """
        choice = self._within(budget.simulated)
        if choice is None and self.floor.outcome.peak_bytes <= budget.simulated:
            choice = self.floor
        if choice is None:
            smallest = self.floor.outcome.peak_bytes + budget.bias
            raise self.infeasible(budget.bytes, smallest)
        return self._plan(choice, budget)

    def floor_plan(self, budget: Budget) -> Plan:
        """The plan with the smallest peak that was found."""
        return self._plan(self.floor, budget)

    def infeasible(self, budget: int, smallest: int) -> InfeasibleBudget:
        """The error that says what would fit and what sets the smallest peak."""
        set_by = self.set_by(self.floor)
        return InfeasibleBudget(
            f"no plan brings the peak to {format_bytes(budget)}. The smallest found needs "
            f"{format_bytes(smallest)} ({smallest} bytes), and it is set by {set_by}. "
            f"{self._cost_of_pins(smallest)}Give --memory {smallest} or more, or make the batch smaller.",
            smallest_bytes=smallest,
            set_by=set_by,
        )

    def _cost_of_pins(self, smallest: int) -> str:
        """What the smallest peak would be without the pins, as a sentence."""
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
        return f"Without [pins] {format_bytes(without)} would do. "

    def frontier(self, points: int = 8, *, bias: int = 0) -> tuple[FrontierPoint, ...]:
        """The best plan for budgets from the original's peak down to the smallest feasible, and what
        checkpointing by hand would need.

        A looser budget never gets a slower plan than a tighter one: all are looked for before any is taken.
        """
        low, high = self.floor.outcome.peak_bytes, self.simulated_original
        if self.pinned.forced:
            high = self._problem.run(()).peak_bytes
        budgets = [high - (high - low) * step // points for step in range(points + 1)]
        for budget in budgets:
            self._within(budget, _GLANCE)
        found = []
        for budget in budgets:
            choice = self._within(budget, _GLANCE) or self.floor
            found.append(self._point(choice.outcome, choice.options, bias, budget))
        return (*found, *self._by_hand(bias))

    def _by_hand(self, bias: int) -> Iterator[FrontierPoint]:
        """What a person would do, where it saves anything."""
        for way in by_hand(self._priced):
            outcome = simulate(self._priced, way.edits)
            if outcome.peak_bytes < self.simulated_original:
                yield self._point(outcome, way.options, bias, outcome.peak_bytes, way.name)

    def _point(
        self, outcome: Outcome, options: Iterable[Option], bias: int, budget: int, name: str = ""
    ) -> FrontierPoint:
        return FrontierPoint(
            budget_bytes=budget + bias,
            peak_bytes=outcome.peak_bytes + bias,
            step_seconds=self._priced.seconds + outcome.added_seconds,
            where=tuple(option.where for option in options),
            by_hand=name,
        )

    def set_by(self, choice: Choice) -> str:
        """The operator during which memory is highest, or what the choice does before it, in words."""
        index = choice.outcome.task
        if index < 0:
            return "what was alive before the step"
        op = self.profile.operators[index]
        place = self.profile.place_of(index)
        module = self.profile.module_of(index)
        what = self._inserted(choice) or op.name.rpartition(".")[0]
        parts = [f"{what} in the {op.phase}"]
        if module:
            parts.append(f"of {module}")
        if place:
            parts.append(f"({place.path}:{place.line})")
        return " ".join(parts)

    def _inserted(self, choice: Choice) -> str:
        """What the choice does just before the task at which memory is highest, where that takes more."""
        step, index = self._overwriting[0], choice.outcome.task
        most, found = step.tasks[index].transient, ""
        for option in choice.options:
            edit = edit_of(step, option)
            for one in edit.inserts if edit else ():
                if one.at == index and level(one) > most:
                    most, found = level(one), f"{option.technique} of {option.where}"
        return found

    @cached_property
    def _free(self) -> tuple[Option, ...]:
        """The options that cost nothing, since they only overwrite."""
        found = self._edits(self._priced)
        free = tuple(o for o, edit in found if edit.overwrites and self.pinned.may(o))
        if not self.pinned.forced:
            return free
        left = [option for option, _ in self._edits(self._overwritten(self._priced, free))]
        if not self.pinned.missing((*free, *left)):
            return free
        return tuple(option for option in free if self.pinned.demands(option))

    @cached_property
    def _problem(self) -> Problem:
        """The options that cost time, in the step in which what may overwrites its input."""
        step, found = self._overwriting
        claimed = [span for _, edit in self._forced for span in edit.claims]
        costly = [
            (option, edit)
            for option, edit in found
            if edit.seconds > _LEAST_SECONDS
            and self.pinned.may(option)
            and not overlap(edit.claims, claimed)
        ]
        forced = [edit for _, edit in self._forced]
        return Problem(step, [o for o, _ in costly], [e for _, e in costly], forced)

    @cached_property
    def _overwriting(self) -> tuple[Step, list[tuple[Option, Edit]]]:
        """The step in which what may overwrites its input, and what else can be done in it."""
        step = self._overwritten(self._priced, self._free)
        costly = [pair for pair in self._edits(step) if not pair[1].overwrites]
        if self._host_bytes is None:
            return step, costly
        admitted = within_host(step, costly, self._host_bytes)
        return step, [*admitted, *in_files(step, costly, admitted, self._allowed_names())]

    @cached_property
    def _forced(self) -> list[tuple[Option, Edit]]:
        """The pinned options and those that save time, those apart that only overwrite."""
        found = [pair for pair in self._overwriting[1] if self._is_on(*pair)]
        missing = self.pinned.missing((*self._free, *(option for option, _ in found)))
        if missing:
            raise UsageError(
                f"`{missing[0]}` is pinned under [pins], and cannot be where another pin lets an activation "
                "overwrite its input. Take one of them out."
            )
        return found

    def _is_on(self, option: Option, edit: Edit) -> bool:
        return self.pinned.demands(option) or (edit.seconds < 0 and self.pinned.may(option))

    def _overwritten(self, step: Step, free: Iterable[Option]) -> Step:
        edits = (edit_of(step, o) for o in free)
        return overwritten(step, (t for edit in edits if edit for t in edit.overwrites))

    @cached_property
    def _solved(self) -> tuple[Front, bool]:
        for solver in _SOLVERS:
            solved = solver.solve(self._problem)
            if solved is not None:
                if not solved.optimal:
                    self._offer_alone(solved.front)
                return solved.front, solved.optimal
        raise AssertionError("the local search takes any problem")

    def _offer_alone(self, front: Front) -> None:
        """Join the choices of fewer options: more that may be chosen must not make the best of all worse."""
        for alone in (*map(self._alone, _by_offload(self._problem)), self._exact):
            if alone is not None:
                for point in alone.front.points:
                    chosen = alone.among_all(point.chosen)
                    front.add(Point(point.peak_bytes, point.seconds, chosen))

    def _offer_lowest_of_exact(self) -> None:
        """Join the smallest peak of the options that change no bit, which among all may not be found."""
        if self._exact is None:
            return
        integer = Integer(self._exact.problem)
        if integer.fits:
            found = integer.lowest(self._exact.front.lowest.chosen)
            if found.chosen is not None:
                self._offer(found._replace(chosen=self._exact.among_all(found.chosen)))

    @cached_property
    def _exact(self) -> _Alone | None:
        """The options that change no bit, where there are others."""
        options = enumerate(self._problem.options)
        return self._alone([n for n, one in options if equivalence_of(one) == "BITWISE"])

    def _alone(self, numbers: list[int]) -> _Alone | None:
        if not 0 < len(numbers) < len(self._problem.options):
            return None
        problem = self._problem.only(numbers)
        solved = (solver.solve(problem) for solver in _SOLVERS)
        return _Alone(numbers, problem, next(one for one in solved if one is not None).front)

    @property
    def _front(self) -> Front:
        return self._solved[0]

    def _edits(self, step: Step) -> list[tuple[Option, Edit]]:
        """The allowed options of a step, and what each changes."""
        found = []
        for name in self._allowed_names():
            for option in options_of(name, step):
                places = {option.where, f"{name}:{option.where}"}
                barred = not places.isdisjoint(self._exclude)
                if barred or not _allowed(equivalence_of(option), self._allow):
                    continue
                edit = edit_of(step, option)
                if edit is not None:
                    found.append((option, edit))
        return found

    def _allowed_names(self) -> list[str]:
        """The techniques that plans may use."""
        known = units(self._exclude)
        return [name for name, unit in known.items() if _allowed(unit.equivalence, self._allow)]

    def _offered(self) -> list[tuple[Option, Edit]]:
        """What can be done, whether or not what may overwrites its input."""
        found = self._edits(self._priced)
        free = [option for option, edit in found if edit.overwrites]
        known = {(option.technique, option.where) for option, _ in found}
        more = self._edits(self._overwritten(self._priced, free))
        return [*found, *(one for one in more if (one[0].technique, one[0].where) not in known)]

    def _within(self, budget: int, seconds: float = _SEARCH) -> Choice | None:
        """The quickest choice whose simulated peak is within a budget, looked for during some seconds."""
        if self.simulated_original <= budget and not self.pinned.forced:
            return self._original
        answer = self._proof(budget, seconds)
        point = self._front.within(budget)
        if point is None:
            return None
        options = tuple(self._problem.options[number] for number in point.chosen)
        outcome = self._problem.run(point.chosen)
        proven = answer is not None and self._problem.is_additive
        bound = answer.bound if answer and proven else least_seconds(self._problem, budget)
        over = outcome.added_seconds - bound
        optimal = self._solved[1] or over <= _ALIKE * abs(bound)
        forced = (option for option, _ in self._forced)
        return Choice((*self._free, *forced, *options), outcome, optimal, bound)

    @cached_property
    def _integer(self) -> Integer | None:
        """What proves choices; None where all were tried, or where it is too large or not installed."""
        if self._solved[1] or not Integer.installed():
            return None
        integer = Integer(self._problem)
        return integer if integer.fits else None

    def _proof(self, budget: int, seconds: float) -> Answer | None:
        """What the integer program says of a budget. Its choice joins the others, so that a looser budget
        gets none that is slower."""
        if self._integer is None:
            return None
        searched, answer = self._answers.get(budget, (0.0, None))
        if answer is None or (searched < seconds and not answer.proven):
            known = self._front.within(budget)
            answer = self._integer.quickest(budget, known.chosen if known else None, seconds)
            self._offer(answer)
            self._answers[budget] = seconds, answer
        return answer

    def _offer(self, answer: Answer) -> None:
        if answer.chosen is not None:
            outcome = self._problem.run(answer.chosen)
            self._front.add(Point(outcome.peak_bytes, outcome.added_seconds, answer.chosen))

    def _seconds(self, choice: Choice) -> tuple[float, float]:
        """What a step takes here with a choice, and what one within its budget takes at least."""
        added, bound = choice.outcome.added_seconds, choice.bound_seconds
        if self._priced is not self._step:
            step = self._overwritten(self._step, self._free)
            added, bound = added_seconds(step, _edits_of(step, choice.options)), 0.0
        return self._step.seconds + added, self._step.seconds + min(bound, added)

    def _plan(self, choice: Choice, budget: Budget) -> Plan:
        seconds, least = self._seconds(choice)
        step = self._overwriting[0] if choice.options else self._priced
        edits = _edits_of(step, choice.options)
        return made_plan(
            self.profile,
            fingerprint=self._fingerprint,
            script_sha256=self._sha256,
            budget_bytes=budget.bytes,
            memory_kind=budget.kind,
            techniques=tuple(settled(step, one) for one in techniques_of(choice.options)),
            predicted=Prediction(
                peak_bytes=max(choice.outcome.peak_bytes + budget.bias, 0),
                step_seconds=seconds,
                host_bytes=host_peak(edits),
                stall_seconds=traffic(step, edits).stall,
            ),
            pins=self._pins,
            status="optimal" if choice.optimal else "feasible",
            bound_seconds=least,
        )


def _priced(step: Step) -> Step:
    """The step with what its tasks cost on the device that it is for, where that is an emulated one."""
    assert step.profile is not None
    if not is_emulated(step.profile.device):
        return step
    return on_device(step, device_of(step.profile))


def _allowed(equivalence: Equivalence, allow: Equivalence) -> bool:
    return EQUIVALENCES.index(equivalence) <= EQUIVALENCES.index(allow)


def _by_offload(problem: Problem) -> tuple[list[int], list[int]]:
    """The options that only offload, and those that never do."""
    count = range(len(problem.options))
    offloads = [number for number in count if problem.edits[number].trips]
    return offloads, [number for number in count if not problem.edits[number].trips]


def _edits_of(step: Step, options: Iterable[Option]) -> list[Edit]:
    """What options change in a step."""
    edits = (edit_of(step, option) for option in options)
    return [edit for edit in edits if edit is not None]
