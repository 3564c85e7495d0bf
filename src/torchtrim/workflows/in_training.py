"""Fits a training while it runs: repeats its last two steps to plan and verify, then applies the plan."""

from __future__ import annotations

import copy
import sys
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn

from torchtrim.capture.workload import TrainStep
from torchtrim.core.units import format_apart
from torchtrim.errors import ApplyFailed, TorchtrimError, UsageError
from torchtrim.executor.apply import apply_plan, fingerprint_of, named_roots
from torchtrim.executor.places import root_of
from torchtrim.executor.registry import Handles
from torchtrim.records.budget import MemoryKind, memory_limit
from torchtrim.records.plan import Plan
from torchtrim.records.report import Result
from torchtrim.records.terms import Terms, allowance
from torchtrim.records.trial import Request
from torchtrim.report.headline import headline
from torchtrim.workflows.optimize.fitting import Fit, Fitting
from torchtrim.workflows.optimize.report import fitted

if TYPE_CHECKING:
    from torchtrim.executor.registry import Root

_KEPT_STEPS = 2  # a certificate needs two different batches
_OF_TRAINERS = ("micro_batch", "optimizer_in_backward", "shard")
"""Excluded: trainers call backward, clip gradients and save checkpoints between these themselves."""
_GOES_ON = "Training goes on without a plan."


class Trainer(NamedTuple):
    """The means to repeat a step of a trainer.

    `micro_batch(position, *arguments)`: forward and backward of one micro-batch of a step. `update`: clip the
    gradients, step the optimizer, and zero the gradients unless `micro_batch` does. `owners`: objects whose
    counters and lists of metrics a repeated step must leave unchanged.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer
    micro_batch: Callable[..., object]
    update: Callable[[], object]
    owners: tuple[object, ...] = ()


class TrainerStep(TrainStep):
    """A trainer's own training step, repeated with the arguments that two of its steps had."""

    def __init__(self, trainer: Trainer, steps: Sequence[Sequence[tuple[Any, ...]]]) -> None:
        first, second = steps
        super().__init__(trainer.model, _no_loss, trainer.optimizer, first, second_batch=second)
        self._trainer = trainer

    def step(self, number: int, dtype: torch.dtype | None = None) -> None:
        """Repeat the first step for even numbers, the second one for odd numbers."""
        for position, arguments in enumerate(self._batch_of(number, dtype)):
            self._trainer.micro_batch(position, *arguments)
        self._trainer.update()


def _no_loss(_: Any, __: Any) -> torch.Tensor:
    raise AssertionError("a trainer computes its own loss")


class InTraining:
    """Fits a training while it runs.

    The trainer reports each micro-batch and each completed step; after `after` steps the training is planned,
    verified and left with the plan applied. Nothing here ends the training: after any failure it goes on
    unplanned, with one message on stderr. `save` writes the result and returns the page's name.
    """

    def __init__(
        self,
        memory: str | int,
        *,
        memory_kind: MemoryKind = "allocated",
        allow: str = "BITWISE",
        pins: Mapping[str, Sequence[str]] | None = None,
        after: int = 2,
        save: Callable[[Result], str] = lambda _: "",
    ) -> None:
        self._memory = memory
        self._limit = memory_limit(memory, memory_kind)
        allowance(allow)
        if after < _KEPT_STEPS:
            raise UsageError(f"after={after}: a plan needs at least {_KEPT_STEPS} steps to repeat.")
        self._terms = Terms(allow, exclude=_OF_TRAINERS, pins=pins or {})
        self._after = after
        self._save = save
        self._applied = Handles()
        self._steps: list[list[tuple[Any, ...]]] = []
        self._step: list[tuple[Any, ...]] = []
        self._seen = 0
        self.watches = True
        self.result: Result | None = None

    def micro_batch(self, *arguments: Any) -> None:
        """Note a micro-batch that is about to run, by the arguments that repeat it."""
        if self.watches:
            self._step.append(arguments)

    def step_ended(self, trainer: Callable[[], Trainer]) -> None:
        """Note that the optimizer has stepped; after enough steps, fit."""
        if not self.watches or not self._step:
            return
        self._steps = [*self._steps[1 - _KEPT_STEPS :], self._step]
        self._step = []
        self._seen += 1
        if self._seen >= self._after:
            self._attempt(trainer)

    @contextmanager
    def guarded(self) -> Iterator[None]:
        """Leave the training unplanned, and say why, if an integration fails, as on another version."""
        try:
            yield
        except Exception as error:
            self.refuse(f"planning failed: {type(error).__name__}: {error}.")

    def refuse(self, reason: str) -> None:
        """Leave the training unplanned."""
        if self.watches:
            self._stop()
            tell(f"{reason} {_GOES_ON}")

    def finish(self) -> None:
        """Revert the plan at the end of the training."""
        if self.watches and self._seen:
            self.refuse(
                f"the training ended after {self._seen} steps, and a plan needs {self._after}."
            )
        self._stop()
        self._applied.revert()
        self._applied = Handles()

    def _stop(self) -> None:
        self.watches = False
        self._steps, self._step = [], []

    def _attempt(self, trainer: Callable[[], Trainer]) -> None:
        steps = self._steps
        self._stop()
        try:
            with torch.enable_grad():
                self._fit(trainer(), steps)
        except Exception as error:
            said = (
                str(error)
                if isinstance(error, TorchtrimError)
                else f"{type(error).__name__}: {error}"
            )
            tell(f"planning failed: {said.rstrip('.')}. {_GOES_ON}")

    def _fit(self, trainer: Trainer, steps: list[list[tuple[Any, ...]]]) -> None:
        _check_alone()
        tell(
            f"planning for memory={self._memory} after {self._seen} steps, by repeating the last two"
        )
        step = TrainerStep(trainer, steps)
        with unchanged(trainer.owners):
            fit = Fitting(step, Request(steps=2), lambda _: None, self._terms).nearest(self._limit)
        self.result = fitted(step, fit)
        equal = fit.certificate is None or fit.certificate.verdict != "NOT EQUAL"
        if equal and fit.missed is None:
            self._applied = apply_plan(
                fit.plan, roots_of(fit.plan, trainer.model, trainer.optimizer)
            )
        tell(f"{_outcome(fit, self.result)}{self._saved(self.result)}")

    def _saved(self, result: Result) -> str:
        try:
            page = self._save(result)
        except (OSError, TorchtrimError) as error:
            return f" The report was not written: {error}"
        return f" Report: {page}" if page else ""


def _outcome(fit: Fit, result: Result) -> str:
    if fit.missed is not None:
        smallest = fit.missed.smallest_bytes
        asked, needed = format_apart(fit.budget.bytes, smallest)
        return f"no plan reaches {asked}; the smallest peak found is {needed} (memory={smallest}). {_GOES_ON}"
    if fit.certificate is not None and fit.certificate.verdict == "NOT EQUAL":
        return f"the planned step does not equal the original: {fit.certificate.reason}. {_GOES_ON}"
    applied = "The plan is applied." if fit.plan.techniques else "Nothing had to change."
    return f"{headline(result.report).word}. {applied}"


def roots_of(plan: Plan, model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Root]:
    """Return the modules and the optimizer that the places of a plan begin with.

    A trainer may call parts of its model directly, which then are roots of the plan. Raises `ApplyFailed` if
    one is not part of the model.
    """
    roots = named_roots((model, optimizer))
    taken: list[Root] = []
    for name, fingerprint in plan.fingerprint.items():
        kind = name.partition("#")[0]
        for part in model.modules():
            same = type(part).__name__ == kind and fingerprint_of(part) == fingerprint
            if same and not any(part is one for one in taken):
                taken.append(part)
                roots[name] = part
                break
    missing = {root_of(where) for one in plan.techniques for where in one.where} - {*roots}
    if missing:
        raise ApplyFailed(f"the plan changes {', '.join(sorted(missing))}, outside the model.")
    return roots


def _check_alone() -> None:
    distributed = torch.distributed
    if (
        distributed.is_available()
        and distributed.is_initialized()
        and distributed.get_world_size() > 1
    ):
        raise UsageError(
            "the training runs in several processes, and a plan inside a training is for one. Plan the "
            "script instead: torchtrim optimize SCRIPT --memory 60% --processes N, then torchtrim run --plan."
        )


@contextmanager
def unchanged(owners: Sequence[object]) -> Iterator[None]:
    """Restore counters and containers of plain values among the attributes of these objects."""
    before = [(vars(one), _plain_in(vars(one))) for one in owners]
    try:
        yield
    finally:
        for attributes, plain in before:
            attributes.update(plain)


def _plain_in(attributes: dict[str, Any]) -> dict[str, Any]:
    return {name: copy.deepcopy(value) for name, value in attributes.items() if _is_plain(value)}


def _is_plain(value: object) -> bool:
    if isinstance(value, defaultdict | dict):
        return all(map(_is_plain, (*value.keys(), *value.values())))
    if isinstance(value, list | tuple | set | deque):
        return all(map(_is_plain, value))
    return isinstance(value, int | float | str | type(None))


def tell(text: str) -> None:
    """Print a message of torchtrim on stderr."""
    print(f"torchtrim: {text}", file=sys.stderr, flush=True)
