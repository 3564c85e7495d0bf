"""Plans the memory of a live model's calls without gradients, for Python."""

from __future__ import annotations

from typing import Any, Literal

import torch

from torchtrim.api import Fitted, Progress
from torchtrim.certify.network import Optimized, Options, optimize, table_of
from torchtrim.errors import Unsupported, UsageError
from torchtrim.observe.count import arguments_of
from torchtrim.records.memory_table import MemoryTable
from torchtrim.report.network_graph import NetworkPicture
from torchtrim.techniques.network.picture import graph_record
from torchtrim.techniques.network.planned import Planned


class FittedMemory(Fitted):
    """A live model whose calls run by a plan of their memory.

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
        if self._program is None:
            raise Unsupported(f"there is no graph of the whole to draw: {'; '.join(self.notes)}.")
        return NetworkPicture(graph_record(self.plan.script, self._program))


def count_memory(model: torch.nn.Module, inputs: Any) -> MemoryTable:
    """Bytes of a model and of one call of it without gradients, each storage once.

    `inputs`: a tensor, a tuple of arguments, or a dict of named ones. Nothing is computed, except for
    a model whose control flow depends on values.
    """
    planned = Planned.known(model)
    args, kwargs = arguments_of(inputs)
    return table_of(model, inputs, planned.program(*args, **kwargs) if planned else None)


def optimize_memory(
    model: torch.nn.Module,
    inputs: Any,
    mode: Literal["inference", "training"] = "inference",
    *,
    inplace: bool = True,
    reuse_buffers: bool = True,
    remove_grad_params: bool = True,
    split_batch: int = 1,
    verify: bool = True,
    progress: Progress = lambda _: None,
) -> FittedMemory:
    """Make a live model's calls need less memory, and prove that they compute the same.

    `inputs`: a tensor, a tuple of arguments, or a dict of named ones; the plan for others is made when
    they come. `inplace`: operators overwrite what no one looks at again. `reuse_buffers`: results lie
    in one arena. `remove_grad_params`: gradients go to disk until it is reverted. `split_batch`: in how
    many parts of the batch the first layers run. `verify=False` does not run the model.

    While it is applied, calls in eval mode run without gradients; in training mode, or where an input
    wants gradients, the original runs. Raises `UsageError`, and `ApplyFailed` where it would not
    compute the same; the model then is as it was.
    """
    if mode not in ("inference", "training"):
        raise UsageError(f"mode={mode!r}: it is 'inference' or 'training'.")
    if mode == "training":
        raise Unsupported(
            "mode='training' has no plan of its own: autograd frees gradients of activations as soon as "
            "they are used, and what it saves for backward is recomputed by torchtrim.fit(workload, "
            "'60%'). Use that."
        )
    options = Options(inplace, reuse_buffers, remove_grad_params, split_batch)
    return FittedMemory(optimize(model, inputs, options, verify=verify, progress=progress))
