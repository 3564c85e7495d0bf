"""A hook for training loops with accelerate."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torchtrim.integrations.files import saved
from torchtrim.integrations.refusals import SEVERAL, several_optimizers

if TYPE_CHECKING:
    from torchtrim.api import Result, Trainer
    from torchtrim.records.budget import MemoryKind

Loss = Callable[..., Any]


class TorchtrimHook:
    """Decorates the loss function of a loop with accelerate, and fits the training after its first steps.

        accelerator = Accelerator()
        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

        @TorchtrimHook(accelerator, memory="60%")
        def loss_of(model, batch): ...

    The loop calls `loss_of(model, batch)`, `accelerator.backward`, `optimizer.step()`. The arguments are
    those of `TorchtrimCallback`. `accelerator.end_training()` or `finish()` reverts the plan.
    """

    def __init__(
        self,
        accelerator: Any,
        memory: str | int,
        *,
        memory_kind: MemoryKind = "allocated",
        allow: str = "BITWISE",
        pins: Mapping[str, Sequence[str]] | None = None,
        after: int = 2,
        out: str | Path | None = None,
    ) -> None:
        from torchtrim.api import InTraining

        self._accelerator = accelerator
        self._fitting = InTraining(
            memory,
            memory_kind=memory_kind,
            allow=allow,
            pins=pins,
            after=after,
            save=partial(saved, out=out),
        )
        self._clipping: tuple[Any, ...] | None = None
        self._optimizer: Any = None
        self._stepped = False
        self._undo: list[Callable[[], None]] = []
        self._undo_end: Callable[[], None] = lambda: None

    @property
    def result(self) -> Result | None:
        """The report, the profiles and the plan; None before."""
        return self._fitting.result

    def __call__(self, loss: Loss) -> Loss:
        """Return the loss function, watched. Its first argument is the model."""

        @functools.wraps(loss)
        def watched(model: Any, *args: Any, **kwargs: Any) -> Any:
            if self._fitting.watches:
                with self._fitting.guarded():
                    self._before(loss, model, args, kwargs)
            return loss(model, *args, **kwargs)

        return watched

    def finish(self) -> None:
        """Revert the plan."""
        self._fitting.finish()
        self._unwatch()
        self._undo_end()

    def _before(self, loss: Loss, model: Any, args: Any, kwargs: Any) -> None:
        if self._optimizer is None:
            self._watch(model)
        if self._stepped:
            self._stepped = False
            self._fitting.step_ended(lambda: self._described(loss, model))
        self._fitting.micro_batch(args, kwargs)
        if not self._fitting.watches:
            self._unwatch()

    def _watch(self, model: Any) -> None:
        accelerator = self._accelerator
        if reason := _refusal(accelerator, model):
            self._fitting.refuse(reason)
            return
        (prepared,) = accelerator._optimizers
        self._optimizer = getattr(prepared, "optimizer", prepared)
        stepped = self._optimizer.register_step_post_hook(
            lambda *_: setattr(self, "_stepped", True)
        )
        self._undo.append(stepped.remove)
        clip = accelerator.clip_grad_norm_

        def clipped(parameters: Any, *args: Any, **kwargs: Any) -> Any:
            self._clipping = args, kwargs
            return clip(parameters, *args, **kwargs)

        self._undo.append(_replaced(accelerator, "clip_grad_norm_", clipped))
        end = accelerator.end_training

        def ended() -> None:
            self.finish()
            end()

        self._undo_end = _replaced(accelerator, "end_training", ended)

    def _unwatch(self) -> None:
        while self._undo:
            self._undo.pop()()

    def _described(self, loss: Loss, model: Any) -> Trainer:
        from torchtrim.api import Trainer

        accelerator, optimizer = self._accelerator, self._optimizer
        clipping = self._clipping
        self._unwatch()

        def micro_batch(_: int, args: Any, kwargs: Any) -> None:
            accelerator.backward(loss(model, *args, **kwargs))

        def update() -> None:
            if clipping is not None:
                args, kwargs = clipping
                accelerator.clip_grad_norm_(model.parameters(), *args, **kwargs)
            optimizer.step()
            optimizer.zero_grad()

        return Trainer(model, optimizer, micro_batch, update)


def _refusal(accelerator: Any, model: Any) -> str:
    if accelerator.num_processes > 1:
        return SEVERAL
    if getattr(accelerator, "scaler", None) is not None:
        return "mixed_precision='fp16' scales the loss, which a repeated step cannot: use 'bf16'."
    if len(accelerator._optimizers) != 1:
        return several_optimizers(len(accelerator._optimizers))
    return ""


def _replaced(owner: Any, name: str, function: Callable[..., Any]) -> Callable[[], None]:
    """Replace a method of one object; return a function that undoes it."""
    vars(owner)[name] = function

    def undo() -> None:
        if vars(owner).get(name) is function:
            del vars(owner)[name]

    return undo
