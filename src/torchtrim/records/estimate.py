"""An estimate of a step that was not run: its bytes by purpose, and how far its batch can grow."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta, Struct

from torchtrim.records.sharding import ShardedModel

Bytes = Annotated[int, Meta(ge=0)]


class ModuleBytes(Struct, frozen=True, kw_only=True):
    """Bytes at the peak that belong to a module itself, excluding its children. Empty path: no module."""

    path: str
    bytes: Bytes


class LengthProbe(Struct, frozen=True, kw_only=True):
    """A length that was run, not only estimated. `peak_bytes` is null if it does not run, `predicted_bytes`
    if nothing was predicted."""

    length: int
    predicted_bytes: Bytes | None
    peak_bytes: Bytes | None
    fits: bool


class GrowthLimit(Struct, frozen=True, kw_only=True):
    """The largest length of one dimension of the batch within a budget.

    `now` is the current length. `peak_bytes` is the peak at `largest`, null if not even a length of 1 fits;
    `next_bytes` is the peak at one more, null if that does not run, with the reason in `limited_by`. `tried`
    is the longest length tried. If memory fell anywhere as the length grew (`falls`), longer lengths that
    were not tried may fit too. `unused_bytes` of the budget hold tensors of the process that the step does
    not use. With `probes`, all figures come from runs, and `exact` means that `largest` + 1 was run too.
    """

    what: Literal["batch", "sequence"]
    budget_bytes: Bytes
    now: int
    largest: int
    peak_bytes: Bytes | None
    next_bytes: Bytes | None
    limited_by: str = ""
    tried: int = 0
    falls: bool = False
    unused_bytes: Bytes = 0
    probes: tuple[LengthProbe, ...] = ()
    exact: bool = False


class EstimateReport(Struct, frozen=True, kw_only=True):
    """Figures that only an estimate has. The first three are exact to the byte.

    `unused_bytes` is the part of the peak that was live before the step and is not used in it: tensors of
    the process that do not belong to the workload.

    `recomputed_bytes` is the smallest peak that recomputation is predicted to reach, `recomputed` the places
    to recompute; null and empty if it would not help. `sharded`: the ranks and the sharding; null for a
    program that runs in one process. `workspace_bytes`: bytes that PyTorch keeps for cuBLAS beside the peak,
    0 on the CPU and for reserved bytes, which have them.
    """

    parameter_bytes: Bytes
    gradient_bytes: Bytes
    optimizer_bytes: Bytes
    modules: tuple[ModuleBytes, ...] = ()
    recomputed_bytes: Bytes | None = None
    recomputed: tuple[str, ...] = ()
    growth: tuple[GrowthLimit, ...] = ()
    unused_bytes: Bytes = 0
    sharded: ShardedModel | None = None
    workspace_bytes: Bytes = 0


class MemoryTable(Struct, frozen=True, kw_only=True):
    """The bytes of a model and of one call of it, by purpose. Each storage counts once.

    `outputs`: peak bytes of operators' outputs; `workspace`: known upper bound of operators' temporary
    memory, 0 if the call has no memory plan; `made`: bytes of all outputs if nothing were freed. `planned`:
    True for a call without gradients that runs by a memory plan. For a training step the bytes are those
    at its peak, and `gradients` are the parameters' gradients allocated by then.
    """

    outputs: int
    made: int
    workspace: int = 0
    buffers: int
    parameters: int
    gradients: int
    planned: bool = False

    @property
    def total(self) -> int:
        """Peak of outputs and workspace, plus buffers, parameters and gradients."""
        return self.outputs + self.workspace + self.buffers + self.parameters + self.gradients
