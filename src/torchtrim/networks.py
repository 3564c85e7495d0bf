"""Plans the memory of a live model on its own, its calls or its training step, for Python."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch

from torchtrim.api import Fitted, Progress
from torchtrim.certify.estimate import Estimate
from torchtrim.certify.network import Optimized, Options, optimize, table_of, tables_by_batch
from torchtrim.certify.training import optimize_step, step_of, table_of_step
from torchtrim.errors import Unsupported, UsageError
from torchtrim.observe.count import arguments_of
from torchtrim.records.memory_table import MemoryTable
from torchtrim.report.network_graph import NetworkPicture
from torchtrim.report.saving import Saving, SavingPicture
from torchtrim.techniques.network.picture import graph_record
from torchtrim.techniques.network.planned import Planned

Mode = Literal["inference", "training"]


class FittedMemory(Fitted):
    """A live model whose calls, or whose training, go by a plan of their memory.

    `before` and `after`: bytes by what they are for. `notes` say what could not be planned, and why.
    `original`, `planned` and `certificate` are None where it was not verified.
    """

    def __init__(self, optimized: Optimized) -> None:
        if optimized.fit is not None:
            super().__init__(optimized.fit, optimized.applied)
        else:
            self.original = self.planned = self.certificate = None
            self._applied = optimized.applied
        self.plan = optimized.plan
        self.before = optimized.before
        self.after = optimized.after
        self.notes = optimized.notes
        self._program = optimized.program

    def graph(self) -> NetworkPicture:
        """The network's picture: who shares memory with whom. Raises `Unsupported` where there is none."""
        if self._program is None and not self.notes:
            raise Unsupported(
                "in training no operator's results share memory by a plan: autograd gives it back. Draw "
                "the network with mode='inference', or the step's memory with torchtrim.record."
            )
        if self._program is None:
            raise Unsupported(f"there is no graph of the whole to draw: {'; '.join(self.notes)}.")
        return NetworkPicture(graph_record(self.plan.script, self._program))


def count_memory(model: torch.nn.Module, inputs: Any, mode: Mode = "inference") -> MemoryTable:
    """Bytes of a model and of one call of it without gradients, each storage once.

    `inputs`: a tensor, a tuple of arguments, or a dict of named ones. `mode="training"`: of one forward and
    backward, at its peak. Nothing is computed, except for a model whose control flow depends on values.
    """
    if _checked(mode) == "training":
        return table_of_step(Estimate(step_of(model, inputs)).profile)
    planned = Planned.known(model)
    args, kwargs = arguments_of(inputs)
    return table_of(model, inputs, planned.program(*args, **kwargs) if planned else None)


def optimize_memory(
    model: torch.nn.Module,
    inputs: Any,
    mode: Mode = "inference",
    *,
    inplace: bool = True,
    reuse_buffers: bool = True,
    remove_grad_params: bool = True,
    split_batch: int = 1,
    memory: str | int | None = None,
    verify: bool = True,
    progress: Progress = lambda _: None,
) -> FittedMemory:
    """Make a live model's calls, or its training, need less memory, and prove that they compute the same.

    `inputs`: a tensor, a tuple of arguments, or a dict of named ones; the plan for others is made when
    they come. `inplace`: operators overwrite what no one looks at again. `verify=False` runs nothing.

    Inference: `reuse_buffers`: results lie in one arena. `remove_grad_params`: gradients go to disk until it
    is reverted. `split_batch`: in how many parts of the batch the first layers run. While it is applied,
    calls in eval mode run without gradients; in training mode, or where an input wants gradients, the
    original runs.

    Training: what forward saves is computed again in backward, as much of it as `memory` (`"60%"`, bytes)
    demands, or all that lowers the peak; the other options have no say, since autograd reuses memory itself.
    For a step with a loss and an optimizer take `torchtrim.fit`.

    Raises `UsageError`, `InfeasibleBudget`, and `ApplyFailed` where it would not compute the same; the model
    then is as it was.
    """
    if _checked(mode) == "training":
        if split_batch != 1:
            raise UsageError(
                "split_batch is for mode='inference': in training its sum would differ."
            )
        left = () if inplace else ("overwrite",)
        return FittedMemory(
            optimize_step(model, inputs, memory, leave_out=left, verify=verify, progress=progress)
        )
    if memory is not None:
        raise UsageError(
            "memory is for mode='training'; mode='inference' takes as little as it can."
        )
    options = Options(inplace, reuse_buffers, remove_grad_params, split_batch)
    return FittedMemory(optimize(model, inputs, options, verify=verify, progress=progress))


def saving_by_batch(
    model: torch.nn.Module, inputs: Any, batches: Sequence[int] = (1, 4, 16, 64, 128)
) -> SavingPicture:
    """What `optimize_memory` would save of a call, by the size of the batch. Nothing is computed."""
    if not batches or any(size < 1 for size in batches):
        raise UsageError(f"batches={tuple(batches)}: give sizes of 1 or more.")
    tables = tables_by_batch(model, inputs, Options(), batches)
    return SavingPicture(type(model).__name__, [Saving(*one) for one in tables])


def _checked(mode: str) -> str:
    if mode not in ("inference", "training"):
        raise UsageError(f"mode={mode!r}: it is 'inference' or 'training'.")
    return mode
