"""The bytes of a model and of one call of it, by what they are for."""

from __future__ import annotations

from msgspec import Struct


class MemoryTable(Struct, frozen=True, kw_only=True):
    """Bytes, each storage counted once.

    `outputs`: the most that operators' results take at once; `workspace`: what operators are known to
    allocate besides at most, 0 where the call is not planned; `made`: all results, as if nothing were
    freed. `planned`: a call without gradients that runs by a plan of its memory. Of a training step the
    bytes are those at its peak, and `gradients` the parameters' gradients that there are by then.
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
        """Results and workspace at their highest, and what is there always."""
        return self.outputs + self.workspace + self.buffers + self.parameters + self.gradients
