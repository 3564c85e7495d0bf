"""Profile and budget -> plan."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import PurePath

from torchtrim import __version__
from torchtrim.errors import InfeasibleBudget
from torchtrim.planner.overwritten import overwritten
from torchtrim.planner.search import Choice, Search
from torchtrim.planner.simulate import Simulator
from torchtrim.records.plan import MemoryKind, Plan, Prediction, Technique
from torchtrim.records.profile import Profile
from torchtrim.records.report import FrontierPoint
from torchtrim.techniques.base import Option, names, technique
from torchtrim.units import format_bytes


class Planner:
    """Plans for one profile; `step_seconds` is the original's step without the recorder.

    What overwrites its input costs nothing, so whatever may does, in every plan that changes something.
    `leave_out` names techniques that are not to be used.
    """

    def __init__(
        self,
        profile: Profile,
        *,
        step_seconds: float,
        fingerprint: Mapping[str, str],
        script_sha256: str = "",
        leave_out: Collection[str] = (),
    ) -> None:
        self.profile = profile
        self._step_seconds = step_seconds
        self._fingerprint = dict(fingerprint)
        self._sha256 = script_sha256
        self._free = [option for option in _options(profile, leave_out) if option.overwriting]
        self._original = Choice((), Simulator(profile).run(()))
        planned = overwritten(profile, _operators(self._free)) if self._free else profile
        options = [option for option in _options(planned, leave_out) if not option.overwriting]
        self._search = Search(Simulator(planned), options, len(profile.operators))
        self._floor: Choice | None = None

    @property
    def simulated_original(self) -> int:
        """The simulated peak of the step as it is, in bytes."""
        return self._original.outcome.peak_bytes

    @property
    def floor(self) -> Choice:
        """The choice with the smallest peak."""
        if self._floor is None:
            self._floor = self._with_free(self._search.smallest())
        return self._floor

    def plan(self, budget: int, *, bias: int = 0, memory_kind: MemoryKind = "allocated") -> Plan:
        """The quickest plan that is expected to stay within the budget.

        `bias`: by how much the measured figure is over the simulated peak. Raises `InfeasibleBudget`
        with the smallest feasible peak and what sets it.
        """
        if self.simulated_original <= budget - bias:
            return self._plan(self._original, budget, bias, memory_kind)
        choice = self._cheapest(budget - bias)
        if choice is None:
            choice = self.floor
            if choice.outcome.peak_bytes > budget - bias:
                raise self.infeasible(budget, choice.outcome.peak_bytes + bias)
        return self._plan(choice, budget, bias, memory_kind)

    def floor_plan(
        self, budget: int, *, bias: int = 0, memory_kind: MemoryKind = "allocated"
    ) -> Plan:
        """The plan with the smallest peak that was found."""
        return self._plan(self.floor, budget, bias, memory_kind)

    def _cheapest(self, budget: int) -> Choice | None:
        """The choice with the least added time within a budget for the simulated peak."""
        choice = self._search.cheapest(budget)
        return self._with_free(choice) if choice is not None else None

    def _with_free(self, choice: Choice) -> Choice:
        return choice._replace(options=(*self._free, *choice.options))

    def _plan(self, choice: Choice, budget: int, bias: int, memory_kind: MemoryKind) -> Plan:
        return Plan(
            torchtrim=__version__,
            script=_within(self.profile.script, self.profile.project),
            script_sha256=self._sha256,
            fingerprint=self._fingerprint,
            budget_bytes=budget,
            memory_kind=memory_kind,
            techniques=_techniques(choice.options),
            predicted=Prediction(
                peak_bytes=max(choice.outcome.peak_bytes + bias, 0),
                step_seconds=self._step_seconds + choice.outcome.added_seconds,
            ),
        )

    def infeasible(self, budget: int, smallest: int) -> InfeasibleBudget:
        """The error that says what would fit and what stands in the way."""
        set_by = self._set_by(self.floor)
        return InfeasibleBudget(
            f"no plan brings the peak to {format_bytes(budget)}. The smallest found needs "
            f"{format_bytes(smallest)} ({smallest} bytes), and it is set by {set_by}. "
            f"Give --memory {smallest} or more, or make the batch smaller.",
            smallest_bytes=smallest,
            set_by=set_by,
        )

    def frontier(self, points: int = 8, *, bias: int = 0) -> tuple[FrontierPoint, ...]:
        """The best plan for budgets from the original's peak down to the smallest feasible."""
        low, high = self.floor.outcome.peak_bytes, self.simulated_original
        found = []
        for step in range(points + 1):
            budget = high - (high - low) * step // points
            choice = self._cheapest(budget) or self.floor
            found.append(
                FrontierPoint(
                    budget_bytes=budget + bias,
                    peak_bytes=choice.outcome.peak_bytes + bias,
                    step_seconds=self._step_seconds + choice.outcome.added_seconds,
                    where=tuple(option.where for option in choice.options),
                )
            )
        return tuple(found)

    def _set_by(self, choice: Choice) -> str:
        index = choice.outcome.peak_operator
        if not self.profile.operators:
            return "what was alive before the step"
        op = self.profile.operators[index]
        place = self.profile.place_of(index)
        module = self.profile.module_of(index)
        parts = [f"{op.name.rpartition('.')[0]} in the {op.phase}"]
        if module:
            parts.append(f"of {module}")
        if place:
            parts.append(f"({place.path}:{place.line})")
        return " ".join(parts)


def _within(script: str, project: str) -> str:
    """The script's path from its project, since a plan is committed there."""
    path = PurePath(script)
    return path.relative_to(project).as_posix() if path.is_relative_to(project) else script


def _options(profile: Profile, leave_out: Collection[str]) -> list[Option]:
    wanted = [name for name in names() if name not in leave_out]
    return [option for name in wanted for option in technique(name).options(profile)]


def _operators(options: Iterable[Option]) -> list[int]:
    return [operator for option in options for operator in option.overwriting]


def _techniques(options: Sequence[Option]) -> tuple[Technique, ...]:
    places: defaultdict[str, list[str]] = defaultdict(list)
    for option in options:
        places[option.technique].append(option.where)
    return tuple(
        Technique(name=name, where=tuple(where), equivalence=technique(name).equivalence)
        for name, where in places.items()
    )


def where_of(techniques: Iterable[Technique]) -> list[str]:
    """All places of a plan."""
    return [where for one in techniques for where in one.where]
