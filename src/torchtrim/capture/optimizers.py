"""Names optimizers as plans do, and records the updates of each call of `step`."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from msgspec.structs import replace

from torchtrim.capture.code.step_paths import step_follows
from torchtrim.records.profile import OptimizerStep, Update

Numbers = Callable[[Any, str], tuple[int, ...]]


def names_of(optimizers: Iterable[torch.optim.Optimizer]) -> list[str]:
    """Name each optimizer after its class, with `#2` and so on for further ones."""
    seen: Counter[str] = Counter()
    names = []
    for optimizer in optimizers:
        stem = type(optimizer).__name__
        seen[stem] += 1
        names.append(stem if seen[stem] == 1 else f"{stem}#{seen[stem]}")
    return names


def parameters_of(optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    """Yield all parameters of an optimizer's groups, in order."""
    for group in optimizer.param_groups:
        yield from group["params"]


class OptimizerSteps:
    """A record of the calls of `step` between `begin` and `stop`.

    `numbers` returns the storage numbers of tensors, given a kind for new ones; `clock` returns the number
    of the next operator.
    """

    def __init__(self, numbers: Numbers, clock: Callable[[], int]) -> None:
        self._numbers = numbers
        self._clock = clock
        self._ready: dict[int, int] = {}
        self._added: Counter[int] = Counter()
        self._undo = contextlib.ExitStack()
        self._skips: dict[int, dict[int, str]] = {}
        self._first = 0
        self._found: list[tuple[torch.optim.Optimizer, OptimizerStep, tuple[int, ...]]] = []

    def begin(self, optimizers: Iterable[torch.optim.Optimizer]) -> None:
        """Hook the gradient accumulation of these optimizers' parameters."""
        for optimizer in optimizers:
            for parameter in parameters_of(optimizer):
                if parameter.is_leaf and parameter.requires_grad:
                    # Not a partial: its `__module__` is not torchtrim's, which marks our hooks.
                    adds = lambda one, owner=optimizer: self._adds(owner, one)  # noqa: E731
                    hook = parameter.register_post_accumulate_grad_hook
                    self._undo.callback(hook(adds).remove)  # type: ignore[no-untyped-call]

    def stop(self) -> None:
        """Remove the hooks."""
        self._undo.close()

    def starts(self) -> None:
        """Handle the start of an optimizer's `step`."""
        self._first = self._clock()

    def ends(self, optimizer: torch.optim.Optimizer) -> None:
        """Handle the end of `step`, before gradients are freed."""
        updates = dict(self._updates(optimizer))
        for parameter in parameters_of(optimizer):
            self._added.pop(id(parameter), None)
        kind = f"{type(optimizer).__module__}.{type(optimizer).__qualname__}"
        hooked = bool(optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks)
        skipped = next(filter(None, self._skips.pop(id(optimizer), {}).values()), "")
        values = tuple(updates.values())
        step = OptimizerStep("", kind, self._first, self._clock(), values, hooked, skipped)
        self._found.append((optimizer, step, tuple(updates)))

    def named(self, optimizers: Sequence[torch.optim.Optimizer]) -> list[OptimizerStep]:
        """Return the calls, with the optimizers' names."""
        names = dict(zip(map(id, optimizers), names_of(optimizers), strict=True))
        calls = []
        for optimizer, step, ids in self._found:
            if (name := names.get(id(optimizer))) is not None:
                # A gradient accumulated again after the last step is never ready: another model's
                # backward may reach its parameter.
                updates = tuple(
                    replace(update, ready=-1) if self._added[key] else update
                    for key, update in zip(ids, step.updates, strict=True)
                )
                calls.append(replace(step, optimizer=name, updates=updates))
        return calls

    def _adds(self, optimizer: torch.optim.Optimizer, parameter: torch.Tensor) -> None:
        skips = self._skips.setdefault(id(optimizer), {})
        if (backward := torch._C._current_graph_task_id()) not in skips:
            skips[backward] = step_follows(optimizer).why_not
        self._ready[id(parameter)] = self._clock()
        self._added[id(parameter)] += 1

    def _updates(self, optimizer: torch.optim.Optimizer) -> Iterator[tuple[int, Update]]:
        for number, group in enumerate(optimizer.param_groups):
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                ready = self._ready.get(id(parameter), -1)
                states = self._numbers(optimizer.state.get(parameter, {}), "optimizer_state")
                own = self._numbers((parameter,), "parameter")
                gradient = self._numbers((parameter.grad,), "gradient")
                if own and gradient:
                    ready = ready if len(gradient) == 1 else -1
                    added = self._added[id(parameter)]
                    update = Update(own[0], gradient[0], states, number, ready, added)
                    yield id(parameter), update
