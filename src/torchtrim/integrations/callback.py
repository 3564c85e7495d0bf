"""A callback for the trainers of transformers and trl, and for Lightning's."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torchtrim.integrations import lightning, transformers
from torchtrim.integrations.files import saved

if TYPE_CHECKING:
    from torchtrim.api import InTraining, Result
    from torchtrim.records.budget import MemoryKind


def _nothing(*_: Any, **__: Any) -> None: ...


class TorchtrimCallback:
    """Fits a training into a budget after its first steps: plan, verify, apply, write the report, go on.

    For `callbacks=[...]` of transformers' and trl's trainers and of Lightning's. `memory`: `"60%"` of the
    step's peak, `"8GiB"`, or a number of bytes. `allow` and `pins` work as in `torchtrim.fit`. `after`: the
    number of unplanned steps before. `out`: the folder of the report. The plan is reverted at the end of the
    training. A failure of torchtrim, or a budget that no plan meets, leaves the training unplanned, with one
    message. Raises `UsageError` for an invalid argument.
    """

    state_key = _legacy_state_key = "TorchtrimCallback"

    def __init__(
        self,
        memory: str | int,
        *,
        memory_kind: MemoryKind = "allocated",
        allow: str = "BITWISE",
        pins: Mapping[str, Sequence[str]] | None = None,
        after: int = 2,
        out: str | Path | None = None,
    ) -> None:
        from torchtrim.api import InTraining

        save = partial(saved, out=out)
        self._new: Callable[[], InTraining] = partial(
            InTraining,
            memory,
            memory_kind=memory_kind,
            allow=allow,
            pins=pins,
            after=after,
            save=save,
        )
        self._fitting = self._new()
        self._undo: Callable[[], None] = _nothing
        self._steps = 0

    @property
    def result(self) -> Result | None:
        """The report, the profiles and the plan; None before."""
        return self._fitting.result

    def __getattr__(self, name: str) -> Callable[..., None]:
        """Return a function that does nothing for an event that needs nothing."""
        if name.startswith("on_") or name in ("setup", "teardown", "load_state_dict"):
            return _nothing
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def state_dict(self) -> dict[str, Any]:
        """Return nothing: a resumed training is planned again."""
        return {}

    def on_train_begin(self, args: Any, *_: Any, **__: Any) -> None:
        """transformers: begin to watch the trainer that calls this."""
        self._begin()
        with self._fitting.guarded():
            trainer = transformers.trainer_of(self)
            if trainer is None:
                self._fitting.refuse("found no trainer of transformers that has this callback.")
            elif reason := transformers.refusal(trainer):
                self._fitting.refuse(reason)
            else:
                self._trainer = trainer
                self._undo = transformers.watch(trainer, self._fitting)

    def on_step_end(self, *_: Any, **__: Any) -> None:
        """transformers: a step is complete."""
        if self._fitting.watches:
            self._fitting.step_ended(lambda: transformers.described(self._trainer))
            self._unwatch()

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Lightning: begin to watch."""
        self._begin()
        self._steps = trainer.global_step
        with self._fitting.guarded():
            if reason := lightning.refusal(trainer, pl_module):
                self._fitting.refuse(reason)

    def on_train_batch_start(
        self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int
    ) -> None:
        """Lightning: a micro-batch is about to run."""
        self._fitting.micro_batch(batch, batch_idx)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        """Lightning: a micro-batch has run, the last of a step if the optimizer has stepped."""
        if trainer.global_step != self._steps:
            self._steps = trainer.global_step
            self._fitting.step_ended(lambda: lightning.described(trainer, pl_module))

    def on_train_end(self, *_: Any, **__: Any) -> None:
        """Revert the plan."""
        self._fitting.finish()
        self._unwatch()

    def on_exception(self, *_: Any) -> None:
        """Lightning: revert the plan of a training that failed."""
        self.on_train_end()

    def _begin(self) -> None:
        self.on_train_end()
        self._fitting = self._new()

    def _unwatch(self) -> None:
        if not self._fitting.watches:
            undo, self._undo = self._undo, _nothing
            undo()
